// Curves of metrics, those of two runs over each other.

const FIRST = ["reward/mean", "kl/ref", "response/length_mean", "actor/loss", "critic/loss", "time/iteration", "perf/tokens_per_second", "actor/rollout_log_prob_diff"];

function showCurves() {
  const names = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.metrics)))];
  if (!names.length) return;
  const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  const search = el("input", { type: "search", placeholder: "search metrics", oninput: () => filter() });
  const log = el("input", { type: "checkbox", onchange: () => charts.forEach((chart) => chart.draw()) });
  const charts = names.map((name) => chart(name, log));
  const count = el("span", { className: "dim" });
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    charts.forEach((one) => { one.node.hidden = !words.every((word) => one.name.toLowerCase().includes(word)); });
    count.textContent = `${charts.filter((one) => !one.node.hidden).length} of ${charts.length}`;
  };
  const legend = DATA.runs.length > 1 ? DATA.runs.map((run, at) => key(at ? "var(--b)" : "var(--a)", run.name)) : [];
  section("curves", "Curves", el("div", { className: "tools" }, search, count, el("label", {}, log, " log scale"), legend),
    el("div", { className: "charts" }, charts.map((one) => one.node)));
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => entry.isIntersecting && entry.target.draw()));
  charts.forEach((one) => { one.node.draw = one.draw; seen.observe(one.node); });
  filter();
}

function chart(name, log) {
  const lines = DATA.runs.map((run) => run.metrics[name] || [[], []]);
  const last = lines.map(([, values]) => values.filter(isNumber).at(-1));
  const canvas = el("canvas", { onmousemove: (event) => point(event), onmouseleave: (event) => tip(event, "") });
  const node = el("figure", { className: "chart", data: { metric: name }, onclick: () => { node.classList.toggle("large"); draw(); } },
    el("figcaption", {}, el("b", {}, name), el("span", { className: "dim" }, last.map(number).join(" · "))), canvas);
  const edge = { left: 52, right: 8, top: 8, bottom: 18 };
  let scale = null;

  function draw() {
    if (node.hidden || !canvas.clientWidth) return;
    const [pen, width, height] = context(canvas);
    const flat = lines.flatMap(([, values]) => values.filter(isNumber));
    const steps = lines.flatMap(([at]) => at);
    if (!flat.length) return;
    const logs = log.checked && flat.some((value) => value > 0);
    const form = (value) => (logs ? (value > 0 ? Math.log10(value) : NaN) : value);
    const forms = flat.map(form).filter(Number.isFinite);
    let [low, high] = [Math.min(...forms), Math.max(...forms)];
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5];
    const [first, end] = [Math.min(...steps), Math.max(...steps, Math.min(...steps) + 1)];
    const x = (step) => edge.left + (step - first) / (end - first) * (width - edge.left - edge.right);
    const y = (value) => edge.top + (high - value) / (high - low) * (height - edge.top - edge.bottom);
    scale = { x, first, end, width };
    pen.strokeStyle = theme("line"); pen.fillStyle = theme("dim"); pen.lineWidth = 1;
    pen.textAlign = "right"; pen.textBaseline = "middle";
    for (const at of ticks(low, high, height > 200 ? 8 : 3)) {
      pen.beginPath(); pen.moveTo(edge.left, y(at)); pen.lineTo(width - edge.right, y(at)); pen.stroke();
      pen.fillText(number(logs ? 10 ** at : Number(at.toPrecision(6))), edge.left - 5, y(at));
    }
    pen.textAlign = "center"; pen.textBaseline = "bottom";
    for (const at of ticks(first, end, width / 90)) if (Number.isInteger(at)) pen.fillText(number(at), x(at), height);
    DATA.runs.forEach((run) => run.marks.filter((mark) => mark.kind === "restart" && mark.step >= first && mark.step <= end).slice(0, 50).forEach((mark) => {
      pen.strokeStyle = theme("bad"); pen.setLineDash([3, 3]);
      pen.beginPath(); pen.moveTo(x(mark.step), edge.top); pen.lineTo(x(mark.step), height - edge.bottom); pen.stroke(); pen.setLineDash([]);
    }));
    lines.forEach(([at, values], which) => {
      pen.strokeStyle = pen.fillStyle = theme(which ? "b" : "a"); pen.lineWidth = 1.4;
      pen.beginPath();
      let open = false;
      values.forEach((value, i) => {
        const up = isNumber(value) ? form(value) : NaN;
        if (!Number.isFinite(up)) { open = false; return; }
        if (open) pen.lineTo(x(at[i]), y(up)); else pen.moveTo(x(at[i]), y(up));
        open = true;
      });
      pen.stroke();
      if (values.length < 40) values.forEach((value, i) => isNumber(value) && Number.isFinite(form(value)) && pen.fillRect(x(at[i]) - 1.5, y(form(value)) - 1.5, 3, 3));
    });
  }

  function point(event) {
    if (!scale) return;
    const share = (event.offsetX - edge.left) / Math.max(scale.width - edge.left - edge.right, 1);
    const wanted = scale.first + share * (scale.end - scale.first);
    const found = lines.map(([at, values], which) => {
      let best = 0;
      at.forEach((step, i) => { if (Math.abs(step - wanted) < Math.abs(at[best] - wanted)) best = i; });
      return at.length ? `${DATA.runs[which].name}: iteration ${number(at[best])}: ${values[best] === null ? "not finite" : number(values[best])}` : "";
    });
    tip(event, [name, ...found.filter(Boolean)].join("\n"));
  }
  redraws.add(draw);
  return { name, node, draw };
}
