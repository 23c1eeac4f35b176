// Devices over time: calls by role, waits for inputs, idle time; memory; times of calls.

const [KIND, DEVICE, ROLE, METHOD, SEQ, STEP, START, READY, END, BYTES_IN, BYTES_OUT, ROWS, TOKENS, BEFORE, AFTER, PEAK, FAILED] = Array(17).keys();
const KINDS = ["call", "transfer", "wait", "switch", "stage"], [CALL, TRANSFER, WAIT, SWITCH] = KINDS.keys();
const isPart = (event) => event[KIND] >= SWITCH;
const roleColours = new Map();

function colourOf(role) {
  if (!roleColours.has(role)) roleColours.set(role, COLOURS[roleColours.size % COLOURS.length]);
  return roleColours.get(role);
}

function showTimeline() {
  const runs = DATA.runs.filter((run) => run.views.length);
  if (!runs.length) return;
  section("timeline", "Timeline", el("p", { className: "dim" },
    "Solid: a call works. Pale: it waits for its inputs. Striped: weights move. The strip below: parts of a call. Faint: calls of other iterations. Empty: the device is idle. " +
    "Drag to move, Ctrl + wheel or + and − to zoom, double click or 0 to see all."),
    runs.map((run) => oneTimeline(run)));
}

function oneTimeline(run) {
  const hidden = new Set(), start = Math.max(run.views.findIndex((view) => view.why.includes("median")), 0);
  const roles = el("div"), facts = el("p", { className: "facts" }), devices = el("div");
  const canvas = el("canvas", { className: "time", tabIndex: 0, ariaLabel: "timeline of " + run.name });
  const pick = el("select", { className: "iteration", onchange: () => choose(Number(pick.value)) },
    options(run.views.map((view, at) => [at, `iteration ${view.step} (${view.why}, ${seconds(view.seconds)})`]), start));
  let view, rows, range, hits = [];

  function choose(at) {
    view = run.views[at];
    view.events.forEach((event) => colourOf(view.names[event[ROLE]]));
    range = [0, Math.max(view.seconds, 1e-9)];
    rows = rowsOf(run, view);
    const names = [...new Set(view.events.map((event) => view.names[event[ROLE]]))];
    roles.replaceChildren(...names.map((role) => {
      const box = el("input", { type: "checkbox", checked: !hidden.has(role), onchange: () => { hidden.has(role) ? hidden.delete(role) : hidden.add(role); draw(); } });
      return el("label", { className: "key" }, box, key(colourOf(role), role));
    }));
    const count = (kind, many) => `${view.counts[kind]} ${view.counts[kind] === 1 ? kind : many}`;
    facts.textContent = [seconds(view.seconds), count("call", "calls"), count("transfer", "transfers"), count("switch", "switches"), count("wait", "waits") + " of the driver",
      `two or more roles work at the same time for ${seconds(view.overlap)} (${percent(view.overlap, view.seconds) || "0 %"})`,
      ...(view.others ? [`${view.others} events of other iterations fall into the same time`] : []),
      ...(view.left_out ? [`the ${view.left_out} shortest events are not drawn`] : [])].join(" · ");
    devices.replaceChildren(deviceTable(run, view));
    canvas.style.height = 26 + rows.reduce((sum, row) => sum + row.height, 0) + 6 + "px";
    draw();
  }

  const left = () => Math.min(190, 14 + 7 * Math.max(...rows.map((row) => row.name.length), 6));
  function draw() {
    if (!canvas.clientWidth || !view) return;
    const [pen, width, height] = context(canvas);
    const edge = left(), x = (at) => edge + (at - range[0]) / (range[1] - range[0]) * (width - edge - 6);
    const drawn = KINDS.map(() => 0);
    hits = [];
    pen.textBaseline = "middle"; pen.textAlign = "center"; pen.fillStyle = theme("dim"); pen.strokeStyle = theme("line");
    for (const at of ticks(range[0], range[1], width / 110)) {
      pen.fillText(seconds(Number(at.toPrecision(9))), Math.max(x(at), edge + 12), 11);
      pen.beginPath(); pen.moveTo(x(at), 22); pen.lineTo(x(at), height); pen.stroke();
    }
    let top = 24;
    for (const row of rows) {
      pen.fillStyle = theme("text"); pen.textAlign = "right"; pen.fillText(row.name, edge - 6, top + row.height / 2, edge - 10);
      pen.strokeStyle = theme("line"); pen.beginPath(); pen.moveTo(0, top + row.height); pen.lineTo(width, top + row.height); pen.stroke();
      pen.save(); pen.beginPath(); pen.rect(edge, top, width - edge, row.height); pen.clip();
      for (const [event, lane] of row.events) {
        if (hidden.has(view.names[event[ROLE]])) continue;
        const own = event[STEP] === view.step;
        if (own) drawn[event[KIND]] += 1;
        if (event[END] < range[0] || event[START] > range[1]) continue;
        bar(pen, event, own, x, top + 2 + lane * row.lane, row.lane - 3);
      }
      pen.restore();
      top += row.height;
    }
    Object.assign(canvas.dataset, { step: view.step, ...Object.fromEntries(KINDS.map((kind, at) => [kind, drawn[at]])) });
  }

  function bar(pen, event, own, x, top, height) {
    const role = view.names[event[ROLE]], thin = isPart(event);
    const [start, ready, end] = [x(event[START]), x(event[READY]), x(event[END])];
    const [y, tall] = thin ? [top + height * 0.7, height * 0.3] : [top, height];
    const alone = event[KIND] === WAIT;
    pen.fillStyle = colourOf(role);
    pen.globalAlpha = (own ? 1 : 0.35) * 0.28;
    pen.fillRect(start, y, Math.max((alone ? end : ready) - start, 0), tall);
    pen.globalAlpha = own ? 1 : 0.35;
    if (!alone) pen.fillRect(ready, y, Math.max(end - ready, 1), tall);
    if (thin) { pen.fillStyle = "#0005"; pen.fillRect(ready, y, 1, tall); pen.fillRect(ready, y, Math.max(end - ready, 1), 1); }
    if (event[KIND] === TRANSFER || event[KIND] === SWITCH) stripes(pen, ready, y, Math.max(end - ready, 1), tall);
    if (event[FAILED]) { pen.strokeStyle = theme("bad"); pen.lineWidth = 2; pen.strokeRect(start, y, end - start, tall); pen.lineWidth = 1; }
    const wide = Math.min(end, canvas.clientWidth) - Math.max(ready, left());
    if (!alone && !thin && wide > 40 && height > 11) {
      pen.fillStyle = "#fff"; pen.textAlign = "left";
      pen.save(); pen.beginPath(); pen.rect(Math.max(ready, left()), y, wide - 3, tall); pen.clip();
      pen.fillText(view.names[event[METHOD]], Math.max(ready, left()) + 4, y + tall / 2);
      pen.restore();
    }
    pen.globalAlpha = 1;
    hits.push([start, Math.max(end, start + 3), y, y + tall, event]);
  }

  function zoom(times, around) {
    const middle = around === undefined ? (range[0] + range[1]) / 2 : around;
    const length = Math.min(Math.max((range[1] - range[0]) * times, view.seconds * 1e-5), view.seconds);
    const share = (middle - range[0]) / (range[1] - range[0]);
    const start = Math.min(Math.max(middle - share * length, 0), view.seconds - length);
    range = [start, start + length];
    draw();
  }
  function move(by) {
    const start = Math.min(Math.max(range[0] + by, 0), view.seconds - (range[1] - range[0]));
    range = [start, start + (range[1] - range[0])];
    draw();
  }
  const perPixel = () => (range[1] - range[0]) / Math.max(canvas.clientWidth - left() - 6, 1);
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, range[0] + (event.offsetX - left()) * perPixel());
  }, { passive: false });
  canvas.addEventListener("dblclick", () => zoom(1e9));
  canvas.addEventListener("keydown", (event) => {
    const act = { "+": () => zoom(0.6), "-": () => zoom(1.7), 0: () => zoom(1e9), ArrowLeft: () => move(-80 * perPixel()), ArrowRight: () => move(80 * perPixel()) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons & 1) { move(-event.movementX * perPixel()); tip(event, ""); return; }
    const hit = hits.findLast(([a, b, c, d]) => event.offsetX >= a && event.offsetX <= b && event.offsetY >= c && event.offsetY <= d);
    tip(event, hit ? told(view, hit[4]) : "");
  });
  canvas.addEventListener("pointerleave", (event) => tip(event, ""));
  redraws.add(draw);
  setTimeout(() => choose(start));
  const button = (shown, times, title) => el("button", { title, onclick: () => zoom(times) }, shown);
  return el("div", { className: "run" }, el("h3", {}, run.name),
    el("div", { className: "tools" }, pick, button("+", 0.6, "zoom in"), button("−", 1.7, "zoom out"), button("all", 1e9, "the whole iteration"), roles),
    canvas, facts, devices);
}

function told(view, event) {
  const name = (at) => view.names[event[at]];
  return [
    `${name(ROLE)}.${name(METHOD)} on ${name(DEVICE)}${event[FAILED] ? " (failed)" : ""}`,
    `iteration ${event[STEP]}, call ${event[SEQ]}, from ${seconds(event[START])}`,
    `works ${seconds(event[END] - event[READY])}, waits ${seconds(event[READY] - event[START])}`,
    event[BYTES_IN] || event[BYTES_OUT] ? `in ${bytes(event[BYTES_IN]) || "?"}, out ${bytes(event[BYTES_OUT]) || "?"}` : "",
    event[ROWS] || event[TOKENS] ? `${number(event[ROWS]) || "?"} rows, ${number(event[TOKENS]) || "?"} tokens` : "",
    event[BEFORE] ? `memory ${bytes(event[BEFORE])} → ${bytes(event[AFTER])}${event[PEAK] !== null ? `, peak ${bytes(event[PEAK])}` : ""}` : "",
  ].filter(Boolean).join("\n");
}

function stripes(pen, x, y, width, height) {
  pen.save(); pen.beginPath(); pen.rect(x, y, width, height); pen.clip();
  pen.strokeStyle = "#fff9"; pen.lineWidth = 2; pen.beginPath();
  const first = Math.max(x, 0), last = Math.min(x + width, pen.canvas.width);
  for (let at = first - height; at < last; at += 6) { pen.moveTo(at, y + height); pen.lineTo(at + height, y); }
  pen.stroke(); pen.restore(); pen.lineWidth = 1;
}

// One row for each device; events of one device at the same time lie in lanes below each other.
function rowsOf(run, view) {
  const named = new Set(view.events.map((event) => view.names[event[DEVICE]]));
  const known = run.devices.map((device) => device.key).filter((name) => named.has(name) || run.devices.length <= 256);
  const names = [...(named.has("driver") ? ["driver"] : []), ...known, ...[...named].filter((name) => name !== "driver" && !known.includes(name))];
  const rows = new Map(names.map((name) => [name, { name, events: [], ends: [] }]));
  for (const event of view.events) {
    const row = rows.get(view.names[event[DEVICE]]);
    if (isPart(event)) { row.events.push([event, -1]); continue; }
    if (event[STEP] !== view.step) { row.events.push([event, 0]); continue; }
    let lane = row.ends.findIndex((end) => end <= event[START] + 1e-6);
    if (lane < 0) lane = row.ends.length < 6 ? row.ends.length : 5;
    row.ends[lane] = event[END];
    row.events.push([event, lane]);
  }
  for (const row of rows.values()) {
    row.lane = names.length > 32 ? 12 : 22;
    row.height = Math.max(row.ends.length, 1) * row.lane + 1;
    row.events = row.events.map(([event, lane]) => [event, lane >= 0 ? lane : around(row, event)]);
    const order = (event) => (event[STEP] === view.step) + 2 * isPart(event); // later ones lie above
    row.events.sort(([one], [other]) => order(one) - order(other));
  }
  return [...rows.values()];
}

function around(row, event) {
  const holder = row.events.find(([other]) => !isPart(other) && other[START] <= event[START] && other[END] >= event[END]);
  return holder ? holder[1] : 0;
}

function deviceTable(run, view) {
  const rows = Object.keys(view.shares).map((name) => {
    const [work, wait] = view.shares[name];
    return { name, work, wait, idle: Math.max(view.seconds - work - wait, 0), about: run.devices.find((one) => one.key === name) || {} };
  });
  if (!rows.length) return "";
  const part = (name, at) => el("i", { style: { width: 100 * at / Math.max(view.seconds, 1e-9) + "%", background: `var(--${name})` } });
  const share = (name) => ({ name, number: true, value: (row) => row[name], show: (row) => `${seconds(row[name])} (${percent(row[name], view.seconds) || "0 %"})` });
  return el("details", { open: rows.length <= 16 }, el("summary", {}, "Working, waiting for inputs, idle, by device"), table([
    { name: "device", value: (row) => row.name }, { name: "node", value: (row) => row.about.node },
    { name: "", value: (row) => row.work, show: (row) => el("div", { className: "split" }, part("busy", row.work), part("wait", row.wait)) },
    share("work"), share("wait"), share("idle"),
  ], rows));
}

function showMemory() {
  const runs = DATA.runs.filter((run) => Object.keys(run.memory).length);
  if (!runs.length) return;
  section("memory", "Memory", runs.map((run) => {
    const phases = [...new Set(Object.values(run.memory).flatMap(Object.keys))].sort();
    const rows = run.devices.filter((device) => run.memory[device.key] || isNumber(device.plan));
    const most = (row) => Math.max(0, ...Object.values(run.memory[row.key] || {}));
    const top = Math.max(...rows.map((row) => Math.max(most(row), row.plan || 0)), 1);
    const columns = [{ name: "device", value: (row) => row.key }, { name: "kind", value: (row) => row.name || row.device }];
    if (rows.some((row) => isNumber(row.memory))) columns.push(size("has", (row) => row.memory));
    if (rows.some((row) => isNumber(row.plan))) {
      columns.push(size("planned", (row) => row.plan), { ...size("most", most), style: (row) => (row.plan && most(row) > row.plan ? { color: "var(--bad)" } : {}) });
      columns.push({ name: "most / planned", number: true, value: (row) => (row.plan ? most(row) / row.plan : null), show: (row) => (row.plan && most(row) ? (most(row) / row.plan).toFixed(2) : "") });
    } else columns.push(size("most", most));
    phases.forEach((phase) => columns.push({
      ...size(phase.replace(/[._/]/g, "$&\u200b"), (row) => (run.memory[row.key] || {})[phase]),
      style: (row) => {
        const found = (run.memory[row.key] || {})[phase] || 0;
        return { background: `color-mix(in srgb, var(--accent) ${Math.round(60 * found / (row.memory || top))}%, transparent)` };
      },
    }));
    return el("div", {}, el("h3", {}, run.name), table(columns, rows), showHeld(run));
  }), el("p", { className: "dim" }, "The most that a device held in each phase, over the run. CUDA: allocated; CPU: resident in the process."));
}

function showHeld(run) {
  const phases = new Map(); // of each phase the fullest device
  Object.entries(run.held || {}).forEach(([device, found]) => Object.entries(found).forEach(([phase, held]) => {
    const all = Object.values(held).reduce((a, b) => a + b, 0);
    if (all > (phases.get(phase) || { all: -1 }).all) phases.set(phase, { phase, device, held, all });
  }));
  if (!phases.size) return "";
  const rows = [...phases.values()];
  const owners = [...new Set(rows.flatMap((row) => Object.keys(row.held)))].sort();
  const columns = [{ name: "after", value: (row) => row.phase }, { name: "device", value: (row) => row.device }];
  owners.forEach((owner) => columns.push(size(owner, (row) => row.held[owner])));
  return el("div", {}, el("p", { className: "dim" }, "By owner, of the device with most. Images are in host memory; activations: at the peak of the call."), table(columns, rows));
}

const size = (name, value) => ({ name, number: true, value, show: (row) => bytes(value(row)) });

function showCalls() {
  const [run, other] = DATA.runs;
  const names = [...new Set(DATA.runs.flatMap((one) => one.calls.map((call) => call.name)))];
  if (!names.length) return;
  const found = (of, name) => (of ? of.calls.find((call) => call.name === name) : null) || {};
  const time = (of, field, shown) => ({ name: shown, number: true, value: (name) => found(of, name)[field], show: (name) => seconds(found(of, name)[field]) });
  const plain = (of, field, shown) => ({ name: shown, number: true, value: (name) => found(of, name)[field], show: (name) => number(found(of, name)[field]) });
  const ratio = (name) => (found(run, name).work > 0 && isNumber(found(other, name).work) ? found(other, name).work / found(run, name).work : null);
  const columns = [{ name: "call", value: (name) => name }, time(run, "work", other ? `works, ${run.name}` : "works")];
  if (other) columns.push(time(other, "work", `works, ${other.name}`), { name: "ratio", number: true, value: ratio, show: (name) => (isNumber(ratio(name)) ? ratio(name).toFixed(2) + " ×" : "") });
  columns.push(time(run, "wait", other ? `waits, ${run.name}` : "waits"));
  if (other) columns.push(time(other, "wait", `waits, ${other.name}`));
  columns.push(plain(run, "ranks", "ranks"), plain(run, "calls", other ? `calls, ${run.name}` : "calls"));
  if (other) columns.push(plain(other, "calls", `calls, ${other.name}`));
  section("calls", "Time per call", el("p", { className: "dim" }, "Seconds per iteration (the median), of the slowest rank of each call."),
    table(columns, names, { state: { by: columns[1].name, down: true } }));
}
