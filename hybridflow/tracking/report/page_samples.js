// Samples: a table to search and sort; the responses of one group side by side, tokens coloured by a field.

const LONG = ["step", "title", "group", "prompt", "response", "tokens", "images"];

function showSamples() {
  const runs = DATA.runs.filter((run) => run.samples.rows.length);
  if (!runs.length) return;
  let run = runs[0], group = null;
  const which = el("select", { className: "which", onchange: () => { run = runs[which.value]; start(); } }, options(runs.map((one, at) => [at, one.name]), 0));
  which.hidden = runs.length < 2;
  const search = el("input", { type: "search", placeholder: "search prompts and responses", oninput: () => fill() });
  const step = el("select", { className: "step", onchange: () => fill() });
  const title = el("select", { className: "title", onchange: () => fill() });
  const count = el("span", { className: "dim count" }), list = el("div", { className: "list" }), detail = el("div", { className: "detail" });
  const state = { by: null, down: false };

  function start() {
    const rows = run.samples.rows;
    const distinct = (name) => [...new Set(rows.map((row) => row[name]))];
    step.replaceChildren(...options([["", "all iterations"], ...distinct("step").map((one) => [String(one), "iteration " + one])], ""));
    title.replaceChildren(...options([["", "all titles"], ...distinct("title").map((one) => [text(one), text(one)])], ""));
    title.hidden = distinct("title").length < 2;
    detail.replaceChildren();
    fill();
  }
  function fill() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = run.samples.rows;
    const rows = all.filter((row) => (!step.value || String(row.step) === step.value) && (!title.value || text(row.title) === title.value)
      && words.every((word) => haystack(row).includes(word)));
    count.textContent = `${rows.length} of ${all.length} rows` + (all.length < run.samples.of
      ? ` (${run.samples.steps} of ${run.samples.steps_of} iterations with samples; the file has ${run.samples.of} rows)` : "");
    list.replaceChildren(table(columnsOf(all), rows, { page: 50, state, pick: (row, node) => {
      list.querySelectorAll("tr.chosen").forEach((one) => one.classList.remove("chosen"));
      node.classList.add("chosen");
      group = showGroup(run, row, group && group.field);
      detail.replaceChildren(group.node);
    } }));
  }
  section("samples", "Samples", el("div", { className: "tools" }, which, search, step, title, count), list, detail);
  start();
}

function haystack(row) {
  if (!Object.hasOwn(row, "#text")) Object.defineProperty(row, "#text", { value: Object.entries(row).filter(([name, value]) => name !== "images" && !isPerToken(row, value)).map(([, value]) => text(value)).join("\n").toLowerCase() });
  return row["#text"];
}

const isPerToken = (row, value) => Array.isArray(value) && (value === row.tokens || (value.length > 0 && value.every((one) => typeof one === "number" || one === null)));

function columnsOf(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((name) => !LONG.includes(name));
  const scalar = names.filter((name) => rows.some((row) => ["number", "boolean", "string"].includes(typeof row[name])));
  const numbers = scalar.filter((name) => rows.every((row) => typeof row[name] !== "string"));
  const plain = (name) => ({ name, number: true, value: (row) => (typeof row[name] === "boolean" ? Number(row[name]) : row[name]), show: (row) => (typeof row[name] === "boolean" ? (row[name] ? "yes" : "no") : number(row[name])) });
  const long = (name) => ({ name, cut: true, value: (row) => text(row[name]).slice(0, 600), show: (row) => (name === "prompt" ? said(row.prompt) : text(row[name])).slice(0, 600) });
  const has = (name) => rows.some((row) => row[name] !== undefined);
  const pictures = { name: "images", value: (row) => thumbnailsOf(row).length, show: (row) => el("span", { className: "thumbnails" }, thumbnailsOf(row)) };
  return [...["step", "group"].filter(has).map(plain), ...(has("images") ? [pictures] : []), ...numbers.map(plain), ...["prompt", "response"].filter(has).map(long), ...scalar.filter((name) => !numbers.includes(name)).map(long)];
}

// A prompt as text: chat messages as "role: content".
function said(prompt) {
  if (!Array.isArray(prompt)) return text(prompt);
  return prompt.map((one) => (one && typeof one === "object" && "content" in one ? `${text(one.role)}: ${text(one.content)}` : text(one))).join("\n\n");
}

const thumbnailsOf = (row) => (Array.isArray(row.images) ? row.images : []).filter((one) => String(one).startsWith("data:image/jpeg;base64,")).map((one) => el("img", { src: one, alt: "" }));

function showGroup(run, row, wanted) {
  const same = (one) => one.step === row.step && one.title === row.title && (row.group === undefined ? said(one.prompt) === said(row.prompt) : one.group === row.group);
  const rows = run.samples.rows.filter(same);
  const fields = [...new Set(rows.flatMap((one) => Object.keys(one).filter((name) => name !== "tokens" && isPerToken(one, one[name]))))];
  const made = { node: null, field: fields.includes(wanted) ? wanted : fields[0] };
  const legend = el("span"), answers = el("div", { className: "group" });
  const pick = el("select", { className: "colour", onchange: () => { made.field = pick.value; fill(); } }, options([...fields.map((name) => [name, name]), ["", "no colour"]], made.field));
  function fill() {
    const scale = scaleOf(rows, made.field);
    legend.replaceChildren(...(scale ? scale.legend : []));
    answers.replaceChildren(...rows.map((one) => answer(one, one === row, fields, made.field, scale)));
  }
  fill();
  made.node = el("div", {}, el("h3", {}, `Iteration ${text(row.step)}, ${rows.length} ${rows.length === 1 ? "response" : "responses"} to one prompt`),
    el("div", { className: "text said" }, said(row.prompt)), el("div", { className: "thumbnails" }, thumbnailsOf(row)),
    fields.length ? el("div", { className: "tools" }, el("label", {}, "colour tokens by ", pick), legend) : null, answers);
  return made;
}

function answer(row, chosen, fields, field, scale) {
  const facts = Object.entries(row).filter(([name, value]) => !LONG.includes(name) && !isPerToken(row, value) && value !== null);
  const head = el("div", { className: "dim" }, facts.map(([name, value]) => `${name} ${isNumber(value) ? number(value) : text(value)}`).join(" · "));
  const values = field && isPerToken(row, row[field]) ? row[field] : null;
  const tokens = Array.isArray(row.tokens) && row.tokens.length ? row.tokens : values ? values.map(() => "▪") : null;
  if (!tokens || !fields.length) return el("div", { className: "answer" + (chosen ? " chosen" : "") }, head, el("div", { className: "text" }, text(row.response)));
  const spans = tokens.map((token, at) => {
    const about = fields.filter((name) => isPerToken(row, row[name])).map((name) => `${name} ${number(row[name][at])}`);
    const colour = values && scale && isNumber(values[at]) ? scale.colour(values[at]) : "";
    return el("span", { title: about.join("\n"), style: colour ? { background: colour } : {} }, text(token));
  });
  return el("div", { className: "answer" + (chosen ? " chosen" : "") }, head,
    row.tokens ? null : el("div", { className: "text" }, text(row.response)), el("div", { className: "tokens" }, spans));
}

// Advantages (both signs): blue above 0, red below. Versions (few whole numbers): one colour each. Others: red is low.
function scaleOf(rows, field) {
  const values = rows.flatMap((row) => (field && isPerToken(row, row[field]) ? row[field].filter(isNumber) : []));
  if (!values.length) return null;
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  const mix = (colour, share) => `color-mix(in srgb, ${colour} ${Math.round(75 * share)}%, transparent)`;
  const distinct = [...new Set(values)].sort((a, b) => a - b);
  if (field.includes("version") || (distinct.length <= COLOURS.length && distinct.every(Number.isInteger))) {
    const colour = (value) => mix(COLOURS[distinct.indexOf(value) % COLOURS.length], 0.7);
    return { colour, legend: distinct.slice(0, 20).map((value) => key(colour(value), number(value))) };
  }
  const blue = "#2f81f7", red = "#e5484d", most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const both = field.includes("advantage") || (low < 0 && high > 0);
  const colour = both ? (value) => mix(value < 0 ? red : blue, Math.abs(value) / most) : (value) => mix(red, high > low ? (high - value) / (high - low) : 0);
  const ends = both ? [-most, 0, most] : [low, high];
  const ramp = el("span", { className: "ramp", style: { background: `linear-gradient(to right, ${ends.map(colour).join(", ")})` } });
  return { colour, legend: [number(ends[0]), " ", ramp, " ", number(ends.at(-1))] };
}
