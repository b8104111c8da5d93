"use strict";
/* The list of runs: search, filter, sort, tick to compare. */

const COLUMNS = [ /* title, key to sort by, class */
  ["", null, "tick"], ["run", "name", "name"], ["state", "status", "status"], ["loss", "loss", "n loss"], ["", null, "curve"], ["tokens", "tokens", "n tokens"], ["tokens/s", "tokens_per_second", "n speed"], ["MFU", "mfu", "n mfu"], ["goodput", "goodput", "n goodput"], ["energy", "joules", "n energy"], ["devices", "devices", "n devices"], ["last update", "updated_at", "n updated"],
];
const ROWS_AT_ONCE = 200; /* a table of ten thousand rows would make every click slow */
const MOST_COMPARED = 30; /* as in api.py */
const picked = new Set(); /* names of runs */
const compare = { key: "loss", x: "step", log: "", mean: "1" };
const listed = { words: "", state: "", sortBy: "updated_at", down: true, at: null };
const UNITS = { loss: "nats per token", val_loss: "nats per token", tokens_per_second: "tokens/s", tokens_per_second_per_device: "tokens/s", step_seconds: "s", data_seconds: "s", spread_seconds: "s", memory_bytes: "GiB", watts: "W", energy_joules: "J", joules_per_token: "J per token", mfu: "share of peak", hfu: "share of peak", utilization: "share" };
const MEANS = { 1: "as logged", 10: "mean of 10 points", 100: "mean of 100 points", 1000: "mean of 1000 points" };

function sentence(text) {
  return text ? `${text[0].toUpperCase()}${text.slice(1)}.` : "";
}

function scaled(key, values) {
  return key === "memory_bytes" ? values.map((v) => (v === null ? null : v / 2 ** 30)) : values;
}

function choice(id, options, value, call) {
  const node = el("select", { id, on: { change: () => call(node.value) } }, Object.entries(options).map(([k, v]) => el("option", { value: k, selected: k === String(value) }, v)));
  return node;
}

function checkbox(id, value, call) {
  const node = el("input", { type: "checkbox", id, checked: Boolean(value), on: { change: () => call(node.checked ? "1" : "") } });
  return node;
}

/* The next row, the one before, or (0) none; a row is kept by its name, because rows move while runs go on. */
function moveRow(by) {
  const rows = [...document.querySelectorAll("#rows tr[data-path]")];
  const now = rows.findIndex((row) => row.classList.contains("at"));
  rows[now]?.classList.remove("at");
  const next = by ? rows[Math.max(0, Math.min(rows.length - 1, now < 0 ? 0 : now + by))] : null;
  next?.classList.add("at");
  next?.scrollIntoView({ block: "nearest" });
  listed.at = next ? next.dataset.path : null;
}

async function runsPage(query, mine) {
  if (query.has("run")) {
    picked.clear();
    for (const name of query.getAll("run")) picked.add(name);
    for (const key of Object.keys(compare)) if (query.has(key)) compare[key] = query.get(key);
  }
  let data = await ask("runs");
  if (!mine()) return;
  const about = data, byId = new Map(data.runs.map((r) => [r.id, r]));
  let most = ROWS_AT_ONCE;
  const filter = el("input", { type: "search", id: "filter", placeholder: "search name, model, tag, note", "aria-label": "search", value: listed.words, on: { input: () => { listed.words = filter.value; most = ROWS_AT_ONCE; fill(); } } });
  const states = choice("states", { "": "every state", running: "running", silent: "silent", stopped: "stopped", failed: "failed", finished: "finished", imported: "imported", unknown: "unknown" }, listed.state, (value) => { listed.state = value; fill(); });
  const sorts = choice("sorts", Object.fromEntries(COLUMNS.filter(([, key]) => key).map(([name, key]) => [key, `sort by ${name}`])), listed.sortBy, (value) => { sortBy(value, true); });
  const count = el("span", { class: "faint", id: "count" });
  const body = el("tbody", { id: "rows" });
  const more = el("button", { id: "more-rows", type: "button", hidden: true, on: { click: () => { most += 1000; fill(); } } });
  const heads = COLUMNS.map(([name, key, kind]) => el("th", { class: kind, "data-key": key }, key ? el("a", { href: "#/", on: { click: (e) => { e.preventDefault(); sortBy(key, listed.sortBy === key ? !listed.down : true); } } }, name) : name));
  const box = el("div", { class: "plot", id: "compare", style: "height:420px" });
  const metrics = Object.keys(about.metrics).filter((key) => !["step", "time", "tokens"].includes(key));
  const set = (name) => (value) => { compare[name] = value; draw(true); };
  const keys = choice("key", Object.fromEntries(metrics.map((m) => [m, m])), compare.key, set("key"));
  const caption = el("p", { class: "caption" });
  const csv = () => `/api/csv?${new URLSearchParams([...picked].slice(0, MOST_COMPARED).map((name) => ["id", name]).concat([["key", compare.key]]))}`;
  const panel = el("section", { id: "comparison", hidden: true }, el("h2", null, "Compare"), el("div", { class: "bar" }, el("label", null, "show ", keys), el("label", null, "over ", choice("axis", about.axes, compare.x, set("x"))), choice("mean", MEANS, compare.mean, set("mean")), el("label", null, checkbox("log", compare.log, set("log")), "logarithmic"), el("button", { id: "none", type: "button", on: { click: () => { picked.clear(); fill(); draw(true); } } }, "untick all")), el("div", { class: "panel" }, box, tools(box, () => fileName("compare", compare.key), csv)), caption);
  page.replaceChildren(el("h1", null, "Runs"), el("p", { class: "sub path" }, about.root), el("div", { class: "bar" }, filter, states, sorts, count), el("div", { class: "wide" }, el("table", { id: "runs" }, el("thead", null, el("tr", null, heads)), body)), more, el("p", { class: "caption" }, "Tick runs to compare their curves below."), panel);

  function sortBy(key, down) {
    Object.assign(listed, { sortBy: key, down });
    sorts.value = key;
    fill();
  }
  function fill() {
    const words = listed.words.toLowerCase().split(/\s+/).filter(Boolean), { sortBy: key, down } = listed;
    const text = (r) => `${r.name} ${r.path} ${r.model} ${r.status} ${r.cluster} ${r.tags.join(" ")} ${r.notes}`.toLowerCase();
    const all = [...byId.values()];
    const shown = all.filter((r) => (!listed.state || r.status === listed.state) && words.every((w) => text(r).includes(w)));
    shown.sort((a, b) => { const [x, y] = [a[key], b[key]]; const c = x === y ? 0 : x === null ? 1 : y === null ? -1 : x < y ? -1 : 1; return x === null || y === null ? c : down ? -c : c; });
    const names = new Map();
    for (const r of all) names.set(r.name, (names.get(r.name) || 0) + 1);
    const none = all.length ? "No run matches the search." : data.reading ? "reading ..." : "No runs here yet. A folder with a config.json, as windlass train and launch write it, appears by itself.";
    const nodes = shown.length ? shown.slice(0, most).map((r) => kept(r, names.get(r.name) > 1)) : [el("tr", null, el("td", { colspan: COLUMNS.length, class: "faint" }, none))];
    /* What did not change stays the same element, so that an update never swallows a click. */
    if (nodes.length !== body.children.length || nodes.some((n, i) => n !== body.children[i])) body.replaceChildren(...nodes);
    for (const th of heads) {
      if (th.dataset.key === key) th.setAttribute("aria-sort", down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    }
    more.hidden = shown.length <= most;
    more.textContent = `show more (${(shown.length - most).toLocaleString("en")} hidden)`;
    const total = all.length.toLocaleString("en");
    count.textContent = (shown.length === all.length ? `${total} runs` : `${shown.length.toLocaleString("en")} of ${total} runs`) + (data.reading ? `, reading ${data.reading.toLocaleString("en")} more` : "");
  }
  const rows = new Map();
  function kept(r, twice) {
    if (!rows.has(r.id) || rows.get(r.id).run !== r || rows.get(r.id).twice !== twice) rows.set(r.id, { run: r, twice, node: row(r, twice) });
    const { node } = rows.get(r.id);
    node.querySelector("input").checked = picked.has(r.path);
    node.classList.toggle("at", listed.at === r.path);
    node.lastElementChild.textContent = ago(r.updated_at);
    return node;
  }
  function row(r, twice) {
    const tick = el("input", { type: "checkbox", "aria-label": `compare ${r.name}`, checked: picked.has(r.path), on: { change: () => { tick.checked ? picked.add(r.path) : picked.delete(r.path); draw(true); } } });
    const silent = r.status === "silent" ? "no new line for a long time; check the job with squeue" : null;
    const chips = r.tags.map((tag) => el("button", { class: "tag", type: "button", title: "show runs with this tag", on: { click: () => { filter.value = listed.words = tag; fill(); } } }, tag));
    const cells = [
      tick,
      [el("a", { href: address("run", r.path) }, breakable(r.name)), twice || !r.name.endsWith(r.path.split("/").pop()) ? el("div", { class: "faint" }, breakable(r.path)) : null, ...chips, r.notes ? el("div", { class: "faint note" }, r.notes) : null],
      [el("span", { class: `state ${r.status}`, title: silent }, r.status), r.problem ? el("div", { class: "faint problem", title: r.problem }, r.problem.replaceAll(`${about.root}/`, "")) : null],
      r.texts.loss, spark(r.spark), r.texts.tokens, r.texts.tokens_per_second, r.texts.mfu, r.texts.goodput,
      [r.energy, r.basis === "modelled" ? el("div", { class: "faint" }, "modelled") : null], r.devices === null ? "" : r.devices, ago(r.updated_at),
    ];
    return el("tr", { "data-path": r.path }, cells.map((content, i) => el("td", { class: COLUMNS[i][2], "data-label": COLUMNS[i][0] }, content)));
  }
  let have = "", turn = 0;
  async function draw(anew) {
    panel.hidden = picked.size === 0;
    if (anew) keepInAddress("", "", picked.size ? [...[...picked].map((name) => ["run", name]), ...Object.entries(compare)] : {});
    if (anew) turn += 1;
    const asked = turn;
    if (!picked.size) return;
    const reply = await ask("series", { id: [...picked].slice(0, MOST_COMPARED), keys: compare.key, x: compare.x, mean: compare.mean, points: 800, have: anew ? "" : have });
    if (reply.unchanged || !mine() || asked !== turn) return; /* another choice was made meanwhile */
    if (reply.error) return (caption.textContent = "The selected runs are no longer in this folder.");
    have = reply.version;
    const shape = layout(compare.key, reply.axis_title, UNITS[compare.key] || "", 420);
    const gone = picked.size - reply.runs.length;
    caption.textContent = [sentence(about.metrics[compare.key]), "Steps that a resume repeated are left out.", gone > 0 ? `${gone} of the ${picked.size} selected runs are not drawn (limit: ${MOST_COMPARED}).` : ""].filter(Boolean).join(" ");
    if (compare.log) shape.yaxis.type = "log";
    shape.uirevision = JSON.stringify([compare.x, compare.key, compare.log]);
    shape.showlegend = true;
    const names = reply.runs.map((r) => r.name), twice = names.length !== new Set(names).size;
    const drawn = (r) => r.series[compare.key].mean || r.series[compare.key];
    plot(box, { data: reply.runs.map((r, i) => curve(twice ? r.path : r.name, drawn(r).x, scaled(compare.key, drawn(r).y), i)), layout: shape });
  }
  async function refresh() {
    const fresh = await ask("runs", { have: data.version });
    if (!mine()) return;
    data = fresh;
    if (data.complete) byId.clear();
    for (const r of data.runs) byId.set(r.id, r);
    fill();
  }
  fill();
  while (data.reading && mine()) await refresh(); /* a large folder comes in parts */
  if (!mine()) return;
  await draw(true);
  every(async () => { await refresh(); if (mine()) await draw(false); }, mine);
}
