"use strict";
/* One run: progress and end time, curves that follow it, notes, and its tables. */

const CURVES = [["loss", "Loss", "nats per token"], ["tokens_per_second", "Throughput", "tokens/s"], ["mfu", "Model FLOP utilisation", "share of peak"], ["watts", "Power", "W"], ["memory_bytes", "Memory, highest device", "GiB"], ["grad_norm", "Gradient norm", ""], ["expert_imbalance", "Most used expert", "load / mean of its layer"], ["router_entropy", "Entropy of the routers", "nats"]];
const NOT_DRAWN = ["step", "tokens", "time", "energy_joules", "nodes", "energy_nodes", "slowest_rank", "skipped", "lr"];
const MARKS = { fault: "#c9405a", hang: "#c9405a", gave_up: "#c9405a", resumed: "#1f9e6e", started: "#1f9e6e", restarted: "#1f9e6e", stopped: "#b9761a", signal: "#b9761a", rollback: "#b9761a", saved: "var(--soft)", finished: "#1f9e6e" };
const look = { x: "step", mean: "1", log: "", logx: "", more: "" };

/* Tokens of the target, and when the run ends: only a run that goes on has an end time. */
function progressBar(data) {
  if (data.tokens === null) return el("p", { class: "faint" }, "No step is logged yet. Progress and curves appear with the first line of metrics.jsonl.");
  if (!data.target_tokens) return el("p", { class: "faint" }, `${data.progress} tokens. The recipe gives no number of tokens, so there is no share and no end time.`);
  const share = data.tokens / data.target_tokens;
  let end = { finished: "finished", silent: `no new line since ${ago(data.updated_at)}: no end time` }[data.status] || `${data.status}: no end time`;
  if (data.status === "running" && data.eta !== null) {
    const at = new Date(1000 * (data.updated_at + data.eta_seconds));
    const when = at > new Date() ? `, ends ${at.toLocaleString("en-GB", { weekday: "short", day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit" })}` : "";
    end = `${data.eta} left${when}`;
  }
  const width = `width:${Math.max(0, Math.min(100, 100 * share))}%`;
  return el("div", { class: "progress" }, el("div", { class: "track", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * share), "aria-label": "tokens of the target" }, el("div", { class: data.status, style: width })), el("span", null, `${(100 * share).toFixed(1)} %, ${data.progress} tokens`), el("span", { id: "eta" }, end));
}

function notesPanel(name, mine) {
  const panel = el("div", { id: "notes" });
  let editing = false;
  function view(notes) {
    if (editing) return; /* an update does not take away what is being written */
    const edit = el("button", { type: "button", id: "edit-notes", on: { click: () => change(notes) } }, notes.text || notes.tags.length ? "edit notes" : "add notes or tags");
    panel.replaceChildren(...notes.tags.map((tag) => el("span", { class: "tag" }, tag)), notes.text ? el("p", { class: "note" }, notes.text) : "", notes.writable ? edit : "");
  }
  function change(notes) {
    editing = true;
    const tags = el("input", { id: "note-tags", placeholder: "tags, separated by commas", "aria-label": "tags", value: notes.tags.join(", ") });
    const text = el("textarea", { id: "note-text", rows: 4, maxlength: 4000, placeholder: "what you tried, and the result", "aria-label": "notes" }, notes.text);
    const problem = el("span", { class: "bad" });
    const close = (after) => { editing = false; if (mine()) view(after); };
    const save = async () => {
      const sent = { text: text.value, tags: tags.value.split(",").map((t) => t.trim()).filter(Boolean) };
      const reply = await fetch(`/api/notes?${new URLSearchParams({ id: name })}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(sent) });
      const answer = reply.ok ? await reply.json() : { error: await reply.text() };
      if (answer.error) problem.textContent = `${answer.error} ${answer.hint || ""}`;
      else close({ ...answer.notes, writable: true });
    };
    panel.replaceChildren(tags, text, el("div", { class: "bar" }, el("button", { type: "button", id: "save-notes", on: { click: save } }, "save"), el("button", { type: "button", on: { click: () => close(notes) } }, "cancel"), el("span", { class: "faint" }, "kept in notes.json of the run folder"), problem));
    text.focus();
  }
  return { panel, view };
}

/* One vertical line through all charts at the pointer's x, with the value of each. */
function crosshair(boxes) {
  const others = (box) => boxes.filter((b) => b !== box && b.isConnected && b.clientWidth && b.getBoundingClientRect().bottom > 0 && b.getBoundingClientRect().top < innerHeight);
  for (const box of boxes) {
    if (box.dataset.linked || !box.on) continue;
    box.dataset.linked = "yes";
    box.on("plotly_hover", (event) => { for (const other of others(box)) Plotly.Fx.hover(other, { xval: event.xvals[0] }, "xy", true); });
    box.on("plotly_unhover", () => { for (const other of others(box)) Plotly.Fx.unhover(other); });
  }
}

async function runPage(name, query, mine) {
  for (const key of Object.keys(look)) if (query.has(key)) look[key] = query.get(key);
  let data = await ask("run", { id: name });
  if (!mine()) return;
  if (data.error) return page.replaceChildren(el("h1", null, "No such run"), el("p", { class: "path" }, `${name} is not in this folder: it may have been moved. `, el("a", { href: "#/" }, "All runs")));
  const shown = CURVES.filter(([key]) => data.metrics.includes(key));
  const extra = data.metrics.filter((m) => !CURVES.some(([k]) => k === m) && !NOT_DRAWN.includes(m));
  if (!extra.includes(look.more)) look.more = "";
  const set = (key, after) => (value) => { look[key] = value; if (after) after(); keepInAddress("run", name, Object.fromEntries(Object.entries(look).filter(([k, v]) => v && v !== { x: "step", mean: "1" }[k]))); draw(true); };
  let zoom = null, zooms = 0; /* zoom: range of the x axis of all charts, in its own units (exponents when logarithmic) */
  const unzoom = () => { zoom = null; zooms += 1; };
  const reset = el("button", { id: "unzoom", type: "button", hidden: true, on: { click: () => { unzoom(); draw(true); } } }, "reset zoom");
  const more = choice("more", Object.fromEntries([["", "another metric"], ...extra.map((m) => [m, m])]), look.more, set("more"));
  const bar = el("div", { class: "bar" }, el("label", null, "over ", choice("axis", { step: "step", tokens: "tokens", time: "time (hours)", kwh: "kWh" }, look.x, set("x", unzoom))), choice("mean", MEANS, look.mean, set("mean")), el("label", null, checkbox("log", look.log, set("log")), "log loss"), el("label", null, checkbox("logx", look.logx, set("logx", unzoom)), "log x"), more, reset, el("span", { class: "faint" }, "dotted red: a fault, green: a start or resume, grey: a save; thin grey curve: steps that were repeated"));
  const csv = (key) => () => `/api/csv?${new URLSearchParams({ id: name, key: key || look.more })}`;
  const chart = (key, title) => {
    const box = el("div", { class: "plot", "data-key": key || "other", style: "height:330px", role: "img", "aria-label": title });
    return { box, panel: el("div", { hidden: !key }, box, tools(box, () => fileName(name, key || look.more), csv(key))) };
  };
  const charts = new Map(shown.map(([key, title]) => [key, chart(key, title)]));
  const other = chart("", "another metric"), everyBox = [...charts.values(), other].map((c) => c.box);
  const notes = notesPanel(name, mine);
  const state = el("span", { id: "state" }), top = el("div", { id: "summary" }), bottom = el("div", { id: "tables" }), bar0 = el("div", { id: "progress" });
  page.replaceChildren(el("h1", null, breakable(data.name), state), el("p", { class: "sub path" }, breakable(data.path), " · ", el("a", { href: address("profile", name) }, "profile")), bar0, notes.panel, top, ...(shown.length ? [bar] : []), el("div", { class: "plots" }, [...charts.values()].map((c) => c.panel), other.panel), bottom);

  function text() {
    const parts = sections(data.sections);
    top.replaceChildren(parts[0]);
    bottom.replaceChildren(...parts.slice(1));
    state.textContent = data.status;
    state.className = `state ${data.status}`;
  }
  function marks(shape) {
    const bad = (e) => (MARKS[e.event] === MARKS.fault ? 1 : 0); /* drawn last, so that a restart at the same step does not hide a fault */
    for (const e of [...data.events].sort((a, b) => bad(a) - bad(b))) {
      const at = look.x === "step" ? e.step : look.x === "time" && data.first_time !== null && e.time !== null ? (e.time - data.first_time) / 3600 : null;
      if (at === null || at === undefined || (look.logx && at <= 0)) continue;
      shape.shapes.push({ type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", layer: "below", opacity: e.event === "saved" ? 0.5 : 1, line: { color: MARKS[e.event] || "var(--soft)", width: e.event === "saved" ? 1 : 1.6, dash: e.event === "saved" ? "solid" : "dot" } });
    }
  }
  function one(box, key, title, unit, series, axisTitle) {
    const shape = layout(title, axisTitle, unit, 330), steep = ["loss", "grad_norm"].includes(key);
    if (!steep) shape.yaxis.rangemode = "tozero";
    if (steep && look.log) shape.yaxis.type = "log";
    if (look.logx) Object.assign(shape.xaxis, { type: "log", dtick: "D2" });
    Object.assign(shape.xaxis, zoom ? { range: [...zoom], autorange: false } : { autorange: true }, { uirevision: String(zoom), showspikes: true, spikemode: "across", spikesnap: "hovered data", spikethickness: 1, spikedash: "solid", spikecolor: "var(--soft)" });
    shape.yaxis.uirevision = `${zooms} ${look.log} ${key}`;
    shape.hovermode = "x";
    marks(shape);
    const whole = curve(key === "loss" ? "train" : title, series.x, scaled(key, series.y), 0);
    const thin = (from, more) => ({ ...curve("", from.x, scaled(key, from.y), 0), mode: "lines", opacity: 0.45, hoverinfo: "skip", hovertemplate: null, showlegend: false, ...more });
    if (key !== "loss") whole.hovertemplate += "<extra></extra>"; /* the chart's title says what it is */
    const traces = series.mean ? [thin(series, { line: { color: PALETTE[0], width: 1 } }), { ...whole, x: series.mean.x, y: scaled(key, series.mean.y) }] : [whole];
    if (series.repeated) traces.unshift(thin(series.repeated, { name: "repeated", line: { color: "var(--soft)", width: 1.4 } }));
    if (key === "loss") {
      const own = look.x === "step" ? { x: data.validations.map((v) => v[0]), y: data.validations.map((v) => v[1]) } : series.validation;
      if (own.y.some((v) => v !== null)) traces.push({ ...curve("validation", own.x, own.y, 1), mode: "markers", marker: { size: 8, color: PALETTE[1] }, connectgaps: false });
    }
    shape.showlegend = key === "loss" && traces.some((t) => t.name === "validation");
    shape.legend = { ...shape.legend, x: 1, xanchor: "right", y: 1.01, yanchor: "bottom" }; /* beside the title: all plots of the page keep one size */
    plot(box, { data: traces, layout: shape });
  }
  let have = "", turn = 0;
  async function draw(anew) {
    if (!shown.length) return;
    if (anew) turn += 1;
    const asked = turn;
    const keys = [...charts.keys(), "val_loss", ...(look.more ? [look.more] : [])];
    const span = zoom ? Object.fromEntries(["low", "high"].map((side, i) => [side, look.logx ? 10 ** zoom[i] : zoom[i]])) : {};
    const reply = await ask("series", { id: name, keys: keys.join(","), x: look.x, mean: look.mean, ...span, points: 900, have: anew ? "" : have });
    if (reply.unchanged || reply.error || !mine() || asked !== turn) return; /* another choice was made meanwhile */
    have = reply.version;
    reset.hidden = !zoom;
    const series = reply.runs[0].series;
    for (const [key, title, unit] of shown) one(charts.get(key).box, key, title, unit, { ...series[key], validation: series.val_loss }, reply.axis_title);
    other.panel.hidden = !look.more;
    if (look.more) one(other.box, look.more, look.more, UNITS[look.more] || "", series[look.more], reply.axis_title);
    crosshair(everyBox);
    for (const box of everyBox) follow(box);
  }
  /* A zoom of one chart zooms all, asks for the points of that part, and stays while lines arrive. */
  function follow(box) {
    if (box.dataset.followed || !box.on) return;
    box.dataset.followed = "yes";
    box.on("plotly_relayout", (change) => {
      if (change["xaxis.autorange"] || change["yaxis.autorange"]) unzoom();
      else if ("xaxis.range[0]" in change) zoom = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      else return;
      draw(true);
    });
  }
  text();
  bar0.replaceChildren(progressBar(data));
  notes.view(data.notes);
  await draw(true);
  every(async () => {
    const fresh = await ask("run", { id: name });
    if (!mine() || fresh.error) return;
    const changed = JSON.stringify(fresh) !== JSON.stringify(data);
    if (changed && !shown.length && fresh.metrics.length) return show(); /* its first line: now there is something to draw */
    const scroll = window.scrollY;
    data = fresh;
    if (changed) { text(); notes.view(data.notes); window.scrollTo(0, scroll); }
    bar0.replaceChildren(progressBar(data));
    await draw(false);
  }, mine);
}
