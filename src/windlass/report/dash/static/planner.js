"use strict";
/* The planner page: move a control, see memory, days, energy and the ranked layouts change. */

const TOKENS = [1e9, 2e9, 5e9, 1e10, 2e10, 5e10, 1e11, 2e11, 3e11, 4.5e11, 6e11, 1e12, 2e12, 3e12, 5e12, 1e13, 1.5e13, 3e13];

async function plannerPage(page, ask, mine) {
  const known = await ask("plan-choices", {});
  if (!mine()) return;
  const state = JSON.parse(sessionStorage.getItem("planner") || "null") || { cluster: "snellius-h100", nodes: 20, size: known.sizes.indexOf("8B"), tokens: 9, seq_len: 8192, precision: "bf16", days: 90 };
  const answer = el("div", { id: "answer" });
  const labels = {};
  const cluster = el("select", { id: "cluster" }, known.clusters.map((c) => el("option", { value: c.name, selected: c.name === state.cluster }, `${c.title} (${c.devices} x ${c.device})`)));
  const options = (id, values, chosen) => el("select", { id }, values.map((v) => el("option", { value: v, selected: v === chosen }, v)));
  const seq = options("seq_len", known.seq_lens, state.seq_len), precision = options("precision", known.precisions, state.precision);
  const slider = (id, low, high, value) => el("input", { type: "range", id, min: low, max: high, step: 1, value });
  const sliders = { nodes: slider("nodes", 0, 1000, nodesToSlider(state.nodes)), size: slider("size", 0, known.sizes.length - 1, state.size), tokens: slider("tokens", 0, TOKENS.length - 1, state.tokens), days: slider("days", 1, 365, state.days) };
  const control = (id, name, input) => el("label", { for: id }, el("span", null, name, " ", (labels[id] = el("b", null))), input);
  page.replaceChildren(
    el("h1", null, "Planner"), el("p", { class: "sub" }, "What fits, how long it takes, and what it costs in energy. Estimates; nothing is submitted."),
    el("div", { class: "panel controls" }, control("cluster", "machine", cluster), control("nodes", "nodes", sliders.nodes), control("size", "model", sliders.size), control("tokens", "tokens", sliders.tokens), control("days", "days you have", sliders.days), control("seq_len", "sequence", seq), control("precision", "precision", precision)),
    answer,
  );

  function most() {
    const found = known.clusters.find((c) => c.name === cluster.value);
    return (found && found.nodes) || 1024;
  }
  function read() {
    state.cluster = cluster.value;
    state.nodes = Math.min(most(), sliderToNodes(Number(sliders.nodes.value)));
    for (const key of ["size", "tokens", "days"]) state[key] = Number(sliders[key].value);
    state.seq_len = Number(seq.value);
    state.precision = precision.value;
    labels.nodes.textContent = state.nodes.toLocaleString("en");
    labels.size.textContent = known.sizes[state.size];
    labels.tokens.textContent = short(TOKENS[state.tokens]);
    labels.days.textContent = state.days;
    sessionStorage.setItem("planner", JSON.stringify(state));
  }
  let timer = null, turn = 0;
  async function update() {
    const mineTurn = ++turn;
    answer.classList.add("busy");
    const reply = await ask("plan", { cluster: state.cluster, nodes: state.nodes, size: known.sizes[state.size], tokens: TOKENS[state.tokens], seq_len: state.seq_len, precision: state.precision, days: state.days });
    if (mineTurn !== turn || !mine()) return; /* a later question is under way */
    answer.classList.remove("busy");
    if (reply.error) answer.replaceChildren(el("p", { class: "warning" }, reply.error), el("p", null, reply.hint || ""));
    else answer.replaceChildren(...sections(reply.sections));
  }
  function changed() {
    read();
    clearTimeout(timer);
    timer = setTimeout(update, 120);
  }
  for (const input of [cluster, seq, precision, ...Object.values(sliders)]) input.addEventListener("input", changed);
  read();
  await update();
}

/* 0..1000 -> 1..4096 nodes, evenly on a logarithmic scale. */
function sliderToNodes(value) {
  return Math.max(1, Math.round(Math.pow(4096, value / 1000)));
}
function nodesToSlider(nodes) {
  return Math.round((1000 * Math.log(nodes)) / Math.log(4096));
}
