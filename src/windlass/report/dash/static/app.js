"use strict";
/* Pages and their live updates. A page asks again every two seconds; the server answers "unchanged" when nothing was written. */

const EVERY = 2000;
const page = document.getElementById("page");
const live = document.getElementById("live");
let turn = 0; /* grows with every change of page, so that a late answer of an old page is dropped */
let timer = null;

async function ask(path, query) {
  const words = new URLSearchParams();
  for (const [key, value] of Object.entries(query || {})) for (const one of [value].flat()) words.append(key, one);
  const reply = await fetch(`/api/${path}?${words}`, { credentials: "same-origin" });
  if (reply.status === 403) throw new Error("the token is no longer valid: open the address that windlass dash printed");
  return reply.json();
}

function said(text, bad) {
  live.textContent = text;
  live.className = bad ? "bad" : "";
}

function every(call, mine) {
  const again = async () => {
    if (!mine()) return;
    try {
      if (!document.hidden) await call();
      if (mine()) said(`live, ${new Date().toLocaleTimeString("en-GB")}`);
    } catch (error) {
      if (mine()) said(`no answer: ${error.message}`, true);
    }
    if (mine()) timer = setTimeout(again, EVERY);
  };
  timer = setTimeout(again, EVERY);
}

const UNITS = { loss: "nats per token", val_loss: "nats per token", tokens_per_second: "tokens/s", tokens_per_second_per_device: "tokens/s", step_seconds: "s", data_seconds: "s", spread_seconds: "s", memory_bytes: "GiB", watts: "W", energy_joules: "J", joules_per_token: "J per token", mfu: "share of peak", hfu: "share of peak", utilization: "share" };
function scaled(key, values) {
  return key === "memory_bytes" ? values.map((v) => (v === null ? null : v / 2 ** 30)) : values;
}

/* -- runs ------------------------------------------------------------------------------------------------------------ */

const picked = new Set();
const compare = { key: "loss", x: "step", log: false };
let wanted = "", sortBy = "updated_at", down = true;
const COLUMNS = [
  ["", null], ["run", "name"], ["state", "status"], ["loss", "loss"], ["", null], ["tokens", "tokens"], ["tokens/s", "tokens_per_second"], ["MFU", "mfu"], ["goodput", "goodput"], ["energy", "joules"], ["devices", "devices"], ["last update", "updated_at"],
];

async function runsPage(mine) {
  let data = await ask("runs");
  if (!mine()) return;
  const filter = el("input", { type: "search", id: "filter", placeholder: "filter by name, model, state", value: wanted, on: { input: () => { wanted = filter.value; fill(); } } });
  const count = el("span", { class: "faint", id: "count" });
  const body = el("tbody", { id: "rows" });
  const head = el("tr", null, COLUMNS.map(([name, key]) => el("th", { class: key && key !== "name" && key !== "status" ? "n" : null }, key ? el("a", { href: "#/", on: { click: (e) => { e.preventDefault(); down = sortBy === key ? !down : true; sortBy = key; fill(); } } }, name) : name)));
  const box = el("div", { class: "plot", id: "compare", style: "height:420px" });
  const keys = el("select", { id: "key", on: { change: () => { compare.key = keys.value; draw(true); } } });
  const axes = el("select", { id: "axis", on: { change: () => { compare.x = axes.value; draw(true); } } }, Object.entries(data.axes).map(([k, v]) => el("option", { value: k, selected: k === compare.x }, v)));
  const log = el("input", { type: "checkbox", id: "log", on: { change: () => { compare.log = log.checked; draw(true); } } });
  for (const key of Object.keys(data.metrics)) if (!["step", "time", "tokens"].includes(key)) keys.append(el("option", { value: key, selected: key === compare.key, title: data.metrics[key] }, key));
  const about = el("p", { class: "caption" });
  const panel = el("section", { id: "comparison", hidden: true }, el("h2", null, "Compare"), el("div", { class: "bar" }, el("label", null, "show ", keys), el("label", null, "over ", axes), el("label", null, log, "logarithmic"), el("button", { id: "none", on: { click: () => { picked.clear(); fill(); draw(true); } } }, "untick all")), el("div", { class: "panel" }, box), about);
  page.replaceChildren(el("h1", null, "Runs"), el("p", { class: "sub" }, data.root), el("div", { class: "bar" }, filter, count), el("div", { class: "wide" }, el("table", { id: "runs" }, el("thead", null, head), body)), el("p", { class: "caption" }, "Select runs to overlay their curves."), panel);

  function fill() {
    const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (r) => `${r.name} ${r.path} ${r.model} ${r.status} ${r.cluster}`.toLowerCase();
    const shown = data.runs.filter((r) => words.every((w) => text(r).includes(w)));
    shown.sort((a, b) => { const [x, y] = [a[sortBy], b[sortBy]]; const c = x === y ? 0 : x === null ? 1 : y === null ? -1 : x < y ? -1 : 1; return x === null || y === null ? c : down ? -c : c; });
    const twice = new Set(data.runs.map((r) => r.name).filter((n, i, all) => all.indexOf(n) !== i));
    const none = data.runs.length ? "no run matches" : "no runs here yet: a folder with a config.json appears by itself";
    const nodes = shown.length ? shown.map((r) => kept(r, twice.has(r.name))) : [el("tr", null, el("td", { colspan: COLUMNS.length, class: "faint" }, none))];
    /* What did not change stays the same element, so that an update never swallows a click. */
    if (nodes.length !== body.children.length || nodes.some((n, i) => n !== body.children[i])) body.replaceChildren(...nodes);
    count.textContent = shown.length === data.runs.length ? `${shown.length} runs` : `${shown.length} of ${data.runs.length} runs`;
  }
  const rows = new Map();
  function kept(r, twice) {
    const key = JSON.stringify([r, twice]);
    if (!rows.has(r.id) || rows.get(r.id).key !== key) rows.set(r.id, { key, node: row(r, twice) });
    const { node } = rows.get(r.id);
    node.querySelector("input").checked = picked.has(r.id);
    node.lastElementChild.textContent = ago(r.updated_at);
    return node;
  }
  function row(r, twice) {
    const tick = el("input", { type: "checkbox", "aria-label": `compare ${r.name}`, "data-id": r.id, checked: picked.has(r.id), on: { change: () => { tick.checked ? picked.add(r.id) : picked.delete(r.id); draw(true); } } });
    const num = (text) => el("td", { class: "n" }, text);
    const silent = r.status === "silent";
    return el("tr", null, el("td", null, tick), el("td", { class: "wrap name" }, el("a", { href: `#/run/${r.id}` }, breakable(r.name)), twice || !r.name.endsWith(r.path.split("/").pop()) ? el("div", { class: "faint" }, breakable(r.path)) : null), el("td", null, el("span", { class: `state ${r.status}`, title: silent ? "no new line for long: is the job still in the queue's list?" : null }, r.status), r.problem ? el("div", { class: "faint" }, r.problem) : null),
      num(r.texts.loss), el("td", null, spark(r.spark)), num(r.texts.tokens), num(r.texts.tokens_per_second), num(r.texts.mfu), num(r.texts.goodput), el("td", { class: "n" }, r.energy, r.basis === "modelled" ? el("div", { class: "faint" }, "modelled") : null), num(r.devices === null ? "" : r.devices), num(ago(r.updated_at)));
  }
  let have = "";
  async function draw(anew) {
    panel.hidden = picked.size === 0;
    if (!picked.size) return;
    const reply = await ask("series", { id: [...picked], keys: compare.key, x: compare.x, points: 800, have: anew ? "" : have });
    if (reply.unchanged || reply.error || !mine()) return;
    have = reply.version;
    const shape = layout(compare.key, reply.axis_title, UNITS[compare.key] || "", 420);
    about.textContent = data.metrics[compare.key] || "";
    if (compare.log) shape.yaxis.type = "log";
    shape.showlegend = true;
    const names = reply.runs.map((r) => r.name), twice = names.length !== new Set(names).size;
    plot(box, { data: reply.runs.map((r, i) => curve(twice ? r.path : r.name, r.series[compare.key].x, scaled(compare.key, r.series[compare.key].y), i)), layout: shape });
  }
  fill();
  await draw(true);
  every(async () => {
    const fresh = await ask("runs");
    if (!mine()) return;
    data = fresh;
    fill();
    await draw(false);
  }, mine);
}

/* -- one run --------------------------------------------------------------------------------------------------------- */

const CURVES = [["loss", "Loss", "nats per token"], ["tokens_per_second", "Throughput", "tokens/s"], ["mfu", "Model FLOP utilisation", "share of peak"], ["watts", "Power", "W"], ["memory_bytes", "Memory, highest device", "GiB"], ["grad_norm", "Gradient norm", ""], ["expert_imbalance", "Most used expert", "load / mean of its layer"], ["router_entropy", "Entropy of the routers", "nats"]];
const MARKS = { fault: "#c9405a", hang: "#c9405a", gave_up: "#c9405a", resumed: "#1f9e6e", started: "#1f9e6e", restarted: "#1f9e6e", stopped: "#b9761a", signal: "#b9761a", rollback: "#b9761a", saved: "var(--soft)", finished: "#1f9e6e" };
let runAxis = "step";

async function runPage(id, mine) {
  let data = await ask("run", { id });
  if (!mine()) return;
  if (data.error) return page.replaceChildren(el("h1", null, "No such run"), el("p", null, "It may have been moved. ", el("a", { href: "#/" }, "All runs")));
  const title = el("h1", null, data.name, el("span", { class: `state ${data.status}`, id: "state" }, data.status));
  const axes = el("select", { id: "axis", on: { change: () => { runAxis = axes.value; draw(true); } } }, [["step", "step"], ["tokens", "tokens"], ["time", "time (hours)"], ["kwh", "kWh"]].map(([k, v]) => el("option", { value: k, selected: k === runAxis }, v)));
  const shown = CURVES.filter(([key]) => data.metrics.includes(key));
  const extra = data.metrics.filter((m) => !CURVES.some(([k]) => k === m) && !["step", "tokens", "time", "energy_joules", "nodes", "energy_nodes", "slowest_rank", "skipped", "lr"].includes(m));
  const more = el("select", { id: "more", on: { change: () => draw(true) } }, el("option", { value: "" }, "another metric"), extra.map((m) => el("option", { value: m }, m)));
  const boxes = new Map(shown.map(([key, name]) => [key, el("div", { class: "plot", "data-key": key, style: "height:330px", role: "img", "aria-label": name })]));
  const other = el("div", { class: "plot", "data-key": "other", style: "height:330px" });
  const otherPanel = el("div", { hidden: true }, other);
  const words = el("div", { id: "words" });
  const top = el("div", { id: "summary" });
  page.replaceChildren(title, el("p", { class: "sub" }, data.path, " · ", el("a", { href: `#/profile/${id}` }, "profile")), top, el("div", { class: "bar" }, el("label", null, "over ", axes), more, el("span", { class: "faint" }, "red: a fault, green: a start or resume, grey: a save")), el("div", { class: "plots" }, [...boxes.values()].map((b) => el("div", null, b)), otherPanel), words);

  function text() {
    const parts = sections(data.sections);
    top.replaceChildren(parts[0]);
    words.replaceChildren(...parts.slice(1));
    const state = document.getElementById("state");
    state.textContent = data.status;
    state.className = `state ${data.status}`;
  }
  function marks(shape) {
    const bad = (e) => (MARKS[e.event] === MARKS.fault ? 1 : 0); /* drawn last, so that a restart at the same step does not hide a fault */
    for (const e of [...data.events].sort((a, b) => bad(a) - bad(b))) {
      const at = runAxis === "step" ? e.step : runAxis === "time" && data.first_time !== null && e.time !== null ? (e.time - data.first_time) / 3600 : null;
      if (at === null || at === undefined) continue;
      shape.shapes.push({ type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", layer: "below", opacity: e.event === "saved" ? 0.5 : 1, line: { color: MARKS[e.event] || "var(--soft)", width: e.event === "saved" ? 1 : 1.6, dash: e.event === "saved" ? "solid" : "dot" } });
    }
  }
  let have = "";
  async function draw(anew) {
    const chosen = more.value;
    const keys = [...boxes.keys(), "val_loss", ...(chosen ? [chosen] : [])];
    const reply = await ask("series", { id, keys: keys.join(","), x: runAxis, points: 900, have: anew ? "" : have });
    if (reply.unchanged || reply.error || !mine()) return;
    have = reply.version;
    const found = reply.runs[0].series;
    const one = (box, key, name, unit) => {
      const shape = layout(name, reply.axis_title, unit, 330);
      if (!["loss", "grad_norm"].includes(key)) shape.yaxis.rangemode = "tozero";
      marks(shape);
      const traces = [curve(key === "loss" ? "train" : name, found[key].x, scaled(key, found[key].y), 0)];
      if (key === "loss") {
        const own = runAxis === "step" ? { x: data.validations.map((v) => v[0]), y: data.validations.map((v) => v[1]) } : found.val_loss;
        if (own.y.some((v) => v !== null)) traces.push({ ...curve("validation", own.x, own.y, 1), mode: "markers", marker: { size: 8, color: PALETTE[1] } });
      }
      shape.showlegend = traces.length > 1;
      shape.legend = { ...shape.legend, x: 1, xanchor: "right", y: 1.01, yanchor: "bottom" }; /* beside the title: all plots of the page keep one size */
      plot(box, { data: traces, layout: shape });
    };
    for (const [key, name, unit] of shown) one(boxes.get(key), key, name, unit);
    otherPanel.hidden = !chosen;
    if (chosen) one(other, chosen, chosen, UNITS[chosen] || "");
  }
  text();
  await draw(true);
  every(async () => {
    const fresh = await ask("run", { id });
    if (!mine() || fresh.error) return;
    const changed = JSON.stringify(fresh) !== JSON.stringify(data);
    const scroll = window.scrollY;
    data = fresh;
    if (changed) { text(); window.scrollTo(0, scroll); }
    await draw(false);
  }, mine);
}

/* -- pages of sections ------------------------------------------------------------------------------------------------ */

async function sectionsPage(title, sub, path, query, mine) {
  let before = "";
  const body = el("div", null, el("p", { class: "faint" }, "reading ..."));
  page.replaceChildren(el("h1", null, title), el("p", { class: "sub" }, sub), body);
  const load = async () => {
    const reply = await ask(path, query);
    const now = JSON.stringify(reply);
    if (!mine() || now === before) return;
    before = now;
    const parts = reply.error ? [el("p", { class: "warning" }, reply.error)] : sections(reply.sections);
    body.replaceChildren(...parts);
  };
  await load();
  every(load, mine);
}

async function sweepPage(id, mine) {
  let before = "";
  const title = el("h1", null, "Sweep");
  const about = el("p", { class: "sub" });
  const choice = el("select", { id: "which", "aria-label": "which sweep", on: { change: () => { location.hash = `#/sweep/${choice.value}`; } } });
  const bar = el("div", { class: "bar" }, el("label", null, "show ", choice));
  const body = el("div", null, el("p", { class: "faint" }, "reading ..."));
  page.replaceChildren(title, about, bar, body);
  const load = async () => {
    const reply = await ask("sweep", id ? { id } : {});
    const now = JSON.stringify(reply);
    if (!mine() || now === before) return;
    before = now;
    if (reply.error) return body.replaceChildren(el("p", { class: "warning" }, `${reply.error}: it may have been moved.`));
    const options = [...reply.sweeps.map((s) => [s.id, s.name]), ["runs", "all runs of this folder against each other"]];
    choice.replaceChildren(...options.map(([value, text]) => el("option", { value, selected: value === reply.id }, text)));
    bar.hidden = !reply.sweeps.length;
    const shown = reply.sweeps.find((s) => s.id === reply.id);
    title.textContent = shown ? shown.title : "All runs against each other";
    about.textContent = shown ? `sweep ${shown.name}, ${shown.progress}; the same rows as its results.csv and report.html` : "every run of this folder with a measured speed; these runs are not part of a sweep";
    const scroll = window.scrollY;
    body.replaceChildren(...sections(reply.sections));
    window.scrollTo(0, scroll);
  };
  await load();
  every(load, mine);
}

async function show() {
  const mine = ((me) => () => me === turn)(++turn);
  clearTimeout(timer);
  const [, name, id] = (location.hash || "#/").split("/");
  for (const a of document.querySelectorAll("nav a")) a.classList.toggle("here", a.dataset.page === (name || "runs") || (a.dataset.page === "runs" && name === "run"));
  said("");
  try {
    if (name === "run") await runPage(id, mine);
    else if (name === "sweep") await sweepPage(id, mine);
    else if (name === "planner") await plannerPage(page, ask, mine);
    else if (name === "data") await sectionsPage("Data ledger", "Where the text comes from and on what terms, by run.", "data", {}, mine);
    else if (name === "profile") await sectionsPage("Profile", "Traces of this run.", "profile", { id }, mine);
    else await runsPage(mine);
    page.dataset.ready = name || "runs";
  } catch (error) {
    page.replaceChildren(el("h1", null, "No answer"), el("p", { class: "warning" }, error.message));
  }
}

document.getElementById("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme.trim() === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
  redraw();
});
const theme = localStorage.getItem("theme");
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
window.addEventListener("hashchange", () => { window.scrollTo(0, 0); show(); }); /* another page begins at its top */
show();
