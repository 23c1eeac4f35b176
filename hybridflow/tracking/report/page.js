// The page: what it begins with, what limits the iteration, restarts, settings.

function showHead() {
  const head = document.getElementById("head");
  head.append(el("h1", {}, DATA.runs.map((run) => run.name).join(" and ")));
  for (const [at, run] of DATA.runs.entries()) {
    const curve = (run.metrics["reward/mean"] || [[], []])[1].filter(isNumber);
    const time = (run.metrics["time/total"] || [[], []])[1].filter(isNumber).at(-1);
    const mfu = (run.metrics["perf/mfu"] || [[], []])[1].filter(isNumber).at(-1);
    const of = (kind) => run.marks.filter((mark) => mark.kind === kind).length;
    const tile = (name, value) => (value ? el("div", { className: "tile" }, el("b", {}, value), el("span", { className: "dim" }, name)) : null);
    head.append(el("div", { className: "dim" }, DATA.runs.length > 1 ? key(at ? "var(--b)" : "var(--a)", run.name) : "", run.directory), el("div", { className: "tiles" },
      tile("iterations", number(run.iterations)), tile("total", seconds(time)),
      tile("per iteration", run.iterations && isNumber(time) ? seconds(time / run.iterations) : ""),
      tile("planned per iteration", seconds(run.plan)),
      tile("mean reward, first → last", curve.length ? `${number(curve[0])} → ${number(curve.at(-1))}` : ""),
      tile("devices", run.devices.length ? number(run.devices.length) : ""),
      tile("MFU", run.devices.length ? (isNumber(mfu) ? percent(mfu, 1) : "unknown") : ""),
      tile("restarts", run.views.length || of("restart") ? number(of("restart")) : ""), tile("skipped steps", of("skipped") ? number(of("skipped")) : ""),
      Object.entries(run.notes).slice(0, 12).map(([name, value]) => tile(name, isNumber(Number(value)) ? number(Number(value)) : text(value).slice(0, 60)))));
    const lost = Object.entries(run.damaged).map(([name, count]) => `${name}: ${count} damaged`);
    if (run.unusable) lost.push(`events.jsonl: ${run.unusable} events of an unknown kind or without times`);
    if (lost.length) head.append(el("p", { className: "bad" }, "Not shown: " + lost.join(", ")));
  }
}

function showLimits() {
  const runs = DATA.runs.filter((run) => run.limits.length);
  if (!runs.length) return;
  section("limits", "What limits the iteration", runs.map((run) => el("div", {}, runs.length > 1 ? el("h3", {}, run.name) : null, table([
    { name: "limit", value: (limit) => limit.name },
    { name: "seconds", number: true, value: (limit) => limit.seconds, show: (limit) => seconds(limit.seconds) },
    { name: "share", number: true, value: (limit) => limit.share, show: (limit) => percent(limit.share, 1) },
    { name: " ", value: (limit) => limit.share, show: (limit) => el("div", { className: "bar", style: { width: 120 * Math.min(Math.max(limit.share || 0, 0), 1) + "px" } }) },
    { name: "what would help", cut: true, value: (limit) => limit.advice },
  ], run.limits))));
}

function showMarks() {
  const runs = DATA.runs.filter((run) => run.marks.length);
  if (!runs.length) return;
  section("restarts", "Restarts and skipped steps", runs.map((run) => el("div", {}, el("h3", {}, run.name), table([
    { name: "iteration", number: true, value: (mark) => mark.step },
    { name: "kind", value: (mark) => mark.kind },
    { name: "time", value: (mark) => (isNumber(mark.start) ? new Date(mark.start * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC" : "") },
    { name: "seconds", number: true, value: (mark) => mark.seconds, show: (mark) => seconds(mark.seconds) },
    { name: "what", cut: true, value: (mark) => mark.what },
  ], run.marks, { page: 100 }), run.marks_of > run.marks.length ? el("p", { className: "dim" }, `the first ${run.marks.length} of ${run.marks_of}`) : null)));
}

function showConfig() {
  if (!DATA.config.length) return;
  const two = DATA.runs.length > 1, differ = (row) => !two || row[1] !== row[2];
  const rows = () => DATA.config.filter((row) => all.checked || differ(row));
  const all = el("input", { type: "checkbox", onchange: () => fill() });
  const list = el("div"), count = DATA.config.filter(differ).length;
  const columns = [{ name: "setting", value: (row) => row[0] }, ...DATA.runs.map((run, at) => ({ name: two ? run.name : "value", value: (row) => row[at + 1] ?? "(none)" }))];
  const fill = () => list.replaceChildren(rows().length ? table(columns, rows()) : "Both runs have the same settings.");
  fill();
  const tools = two ? el("div", { className: "tools" }, `${count} of ${DATA.config.length} settings differ`, el("label", {}, all, " show all")) : null;
  section("settings", two ? "Settings that differ" : "Settings", tools, two ? list : el("details", {}, el("summary", {}, `${DATA.config.length} settings`), list));
}

showHead();
showLimits();
showCurves();
showTimeline();
showCalls();
showMemory();
showSamples();
showMarks();
showConfig();
document.getElementById("main").append(el("p", { className: "dim" }, `Written by hybridflow report, ${DATA.made}.`));
document.documentElement.dataset.ready = "yes";
