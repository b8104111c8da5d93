"use strict";
/* The planner page: type numbers, see memory, days, energy and the ranked layouts change; save the recipe or share the address. */

const SHAPE = { layers: "layers", width: "width", ffn: "feed-forward", heads: "heads", kv_heads: "key/value heads", vocab: "vocabulary" };
const plan = { cluster: "snellius-h100", nodes: "20", size: "8B", tokens: "450B", batch_tokens: "4Mi", seq_len: "8192", precision: "bf16", days: "90" };

async function plannerPage(query, mine) {
  const offered = await ask("plan-choices", {});
  if (!mine()) return;
  for (const key of [...Object.keys(plan), ...Object.keys(SHAPE)]) if (query.has(key)) plan[key] = query.get(key).slice(0, 64);
  const answer = el("div", { id: "answer" });
  const inputs = {};
  const control = (key, title, note, input) => { inputs[key] = input; return el("label", { for: key }, el("span", null, title), input, note instanceof Node ? note : note ? el("i", null, note) : null); };
  const typed = (key, title, note, list) => control(key, title, note, el("input", { id: key, value: plan[key] || "", autocomplete: "off", spellcheck: "false", list: list ? `${key}-offered` : null }));
  const offer = (key, values) => el("datalist", { id: `${key}-offered` }, values.map((v) => el("option", { value: v })));
  const selected = (key, title, options) => control(key, title, "", el("select", { id: key }, options.map(([v, text]) => el("option", { value: v, selected: v === plan[key] }, text))));
  const machines = offered.clusters.map((c) => [c.name, `${c.title} (${c.devices} x ${c.device})`]);
  const nodesNote = el("i"), sizeNote = el("i");
  const copied = el("span", { class: "faint", role: "status" });
  const save = el("button", { type: "button", id: "save-recipe", on: { click: () => reply && downloadText(reply.file, reply.recipe, "application/toml") } }, "save as recipe");
  const share = el("button", { type: "button", id: "share", on: { click: copy } }, "copy link");
  page.replaceChildren(
    el("h1", null, "Planner"), el("p", { class: "sub" }, "What fits, how long it takes, and what it costs in energy. Estimates; nothing is submitted."),
    el("div", { class: "panel controls" }, selected("cluster", "machine", machines), el("label", { for: "nodes" }, el("span", null, "nodes"), (inputs.nodes = el("input", { id: "nodes", value: plan.nodes, inputmode: "numeric", autocomplete: "off" })), nodesNote), typed("size", "parameters", sizeNote, true), typed("tokens", "tokens", "450B, 2T"), typed("batch_tokens", "batch, tokens", "4Mi, 4M"), typed("seq_len", "sequence length", "", true), selected("precision", "precision", offered.precisions.map((p) => [p, p])), typed("days", "days you have", ""), offer("size", offered.sizes), offer("seq_len", offered.seq_lens)),
    el("details", { class: "panel", id: "shape", open: Object.keys(SHAPE).some((key) => plan[key]) }, el("summary", null, "layers, width and other values of the model"), el("div", { class: "controls" }, Object.entries(SHAPE).map(([key, title]) => typed(key, title)))),
    el("div", { class: "bar" }, save, share, copied), answer,
  );

  let reply = null, waiting = null, asked = 0;
  function sent() {
    return Object.fromEntries(Object.entries(plan).filter(([, value]) => value));
  }
  async function copy() {
    try {
      await navigator.clipboard.writeText(location.href);
      copied.textContent = "copied: anyone who can reach this server sees the same numbers";
    } catch {
      copied.textContent = "copy the address of this page instead";
    }
  }
  async function update() {
    const mineTurn = ++asked;
    for (const [key, input] of Object.entries(inputs)) plan[key] = input.value.trim();
    const machine = offered.clusters.find((c) => c.name === plan.cluster);
    nodesNote.textContent = machine && machine.nodes ? `of ${machine.nodes.toLocaleString("en")}` : "";
    keepInAddress("planner", "", sent());
    answer.classList.add("busy");
    const fresh = await ask("plan", sent());
    if (mineTurn !== asked || !mine()) return; /* a later question is under way */
    answer.classList.remove("busy");
    reply = fresh.error ? null : fresh;
    save.disabled = !reply;
    if (fresh.error) return answer.replaceChildren(el("p", { class: "warning lines" }, fresh.error), el("p", null, fresh.hint || ""));
    sizeNote.textContent = Object.keys(SHAPE).some((key) => plan[key]) ? `${fresh.model.parameters} with the values below` : "8B, 350M";
    for (const key of Object.keys(SHAPE)) inputs[key].placeholder = fresh.model[key];
    answer.replaceChildren(el("p", { class: "faint", id: "model" }, `${fresh.model.parameters} parameters: ${Object.entries(SHAPE).map(([key, title]) => `${title} ${fresh.model[key].toLocaleString("en")}`).join(", ")}. ${fresh.considered.toLocaleString("en")} layouts were considered.`), ...sections(fresh.sections));
  }
  for (const input of Object.values(inputs)) {
    input.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(update, 250);
    });
  }
  await update();
}
