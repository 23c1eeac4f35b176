"use strict";
// Elements, tables and numbers. Every text of a run enters the page as a text node, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#3b82d6", "#e07b39", "#3fa66b", "#b365c9", "#c9a227", "#d6507a", "#3aa6b9", "#8a8f3c", "#7d6bd0", "#a0694a"];

function el(tag, given, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(given || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value !== undefined && value !== null) node[name] = value;
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function section(name, title, ...children) {
  document.getElementById("nav").append(el("a", { href: "#" + name }, title));
  const made = el("section", { id: name }, el("h2", {}, title), ...children);
  document.getElementById("main").append(made);
  return made;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function number(value) {
  if (!isNumber(value)) return value === null || value === undefined ? "" : String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return value.toLocaleString("en-US", { maximumSignificantDigits: size >= 1000 ? 6 : 4 });
}

function seconds(value) {
  if (!isNumber(value)) return "";
  if (value >= 5400) return number(Math.round(value / 360) / 10) + " h";
  if (value >= 120) return number(Math.round(value / 6) / 10) + " min";
  if (value >= 1 || value === 0) return value.toFixed(2) + " s";
  return value >= 1e-3 ? (value * 1e3).toFixed(1) + " ms" : (value * 1e6).toFixed(0) + " µs";
}

function bytes(value) {
  if (!isNumber(value)) return "";
  const unit = value >= 1e12 ? [1e12, "TB"] : value >= 1e9 ? [1e9, "GB"] : value >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
  return (value / unit[0]).toFixed(value / unit[0] < 10 ? 2 : 1) + " " + unit[1];
}

const percent = (part, whole) => (whole > 0 ? (100 * part / whole).toFixed(0) + " %" : "");
const text = (value) => (typeof value === "string" ? value : value === null || value === undefined ? "" : JSON.stringify(value));

// columns: {name, value: row => for sorting, show: row => node or text, number, cut, hint}
function table(columns, rows, options) {
  const given = options || {};
  const state = given.state || { by: null, down: false };
  const body = el("tbody");
  const heads = columns.map((column, at) =>
    el("th", { className: (column.number ? "num " : "") + "sorts", title: column.hint || "sort", onclick: () => sort(at) }, column.name));
  let shown = given.page || rows.length;
  const more = el("button", { onclick: () => { shown += given.page; fill(); } });

  function sort(at) {
    state.down = state.by === columns[at].name ? !state.down : !!columns[at].number;
    state.by = columns[at].name;
    fill();
  }
  function ordered() {
    const column = columns.find((one) => one.name === state.by);
    if (!column) return rows;
    const empty = (value) => value === null || value === undefined || value === "";
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
    return [...rows].sort((one, other) => {
      const [a, b] = [column.value(one), column.value(other)];
      if (empty(a) || empty(b)) return empty(a) - empty(b);
      return state.down ? compare(b, a) : compare(a, b);
    });
  }
  function fill() {
    heads.forEach((head, at) => {
      head.textContent = columns[at].name + (state.by === columns[at].name ? (state.down ? " ↓" : " ↑") : "");
    });
    body.replaceChildren(...ordered().slice(0, shown).map((row) => {
      const cells = columns.map((column) => {
        const inside = column.show ? column.show(row) : text(column.value(row));
        return el("td", { className: column.number ? "num" : column.cut ? "cut" : "", style: column.style ? column.style(row) : {} },
          column.cut ? el("div", {}, inside) : inside);
      });
      const made = el("tr", { className: given.pick ? "pick" : "" }, cells);
      if (given.pick) made.addEventListener("click", () => given.pick(row, made));
      return made;
    }));
    more.hidden = shown >= rows.length;
    more.textContent = `show more (${Math.min(shown, rows.length)} of ${rows.length})`;
  }
  fill();
  return el("div", {}, el("div", { className: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), body)), more);
}

const options = (names, chosen) => names.map(([value, shown]) => el("option", { value, selected: value === chosen }, shown));
const key = (colour, name) => el("span", { className: "key" }, el("i", { style: { background: colour } }), name);

function tip(event, content) {
  const box = document.getElementById("tip");
  box.hidden = !content;
  if (!content) return;
  box.textContent = content;
  const place = box.getBoundingClientRect();
  box.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - place.width - 8)) + "px";
  box.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - place.height - 8)) + "px";
}

const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

// A canvas in device pixels; its context draws in CSS pixels.
function context(canvas) {
  const [width, height, ratio] = [canvas.clientWidth, canvas.clientHeight, Math.min(devicePixelRatio || 1, 2)];
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  return [pen, width, height];
}

const redraws = new Set();
addEventListener("resize", () => redraws.forEach((draw) => draw()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((draw) => draw()));

// Round positions for about `count` ticks from low to high.
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(count, 1);
  if (!(raw > 0) || !Number.isFinite(raw)) return [low];
  const base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * base).find((one) => one >= raw * 0.999);
  const out = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6 && out.length < 100; at += step) out.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return out;
}
