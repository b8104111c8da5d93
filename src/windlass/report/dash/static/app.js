"use strict";
/* Which page is shown, its live updates, and the keys. A page asks again every two seconds; the server answers "unchanged" when nothing was written. */

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
  if (reply.status >= 500) throw new Error((await reply.json()).error);
  return reply.json();
}

function status(text, bad) {
  live.textContent = text;
  live.className = bad ? "bad" : "";
}

function every(call, mine) {
  const again = async () => {
    if (!mine()) return;
    const began = performance.now();
    try {
      if (!document.hidden) await call();
      if (mine()) status(`live, ${new Date().toLocaleTimeString("en-GB")}`);
    } catch (error) {
      if (mine()) status(`no answer: ${error.message}`, true);
    }
    /* What takes long, such as ten thousand runs, is asked less often. */
    if (mine()) timer = setTimeout(again, Math.max(EVERY, 4 * (performance.now() - began)));
  };
  timer = setTimeout(again, EVERY);
}

/* What is set on a page stays in its address: it can be shared and survives a reload. */
function keepInAddress(name, argument, query) {
  history.replaceState(null, "", address(name, argument, query));
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
    const options = [...reply.sweeps.map((s) => [s.id, s.name]), ["runs", "comparison of all runs in this folder"]];
    choice.replaceChildren(...options.map(([value, text]) => el("option", { value, selected: value === reply.id }, text)));
    bar.hidden = !reply.sweeps.length;
    const shown = reply.sweeps.find((s) => s.id === reply.id);
    title.textContent = shown ? shown.title : "Comparison of all runs";
    about.textContent = shown ? `sweep ${shown.name}, ${shown.progress}; the same rows as its results.csv and report.html` : "every run of this folder with a measured speed; these runs are not part of a sweep";
    const scroll = window.scrollY;
    body.replaceChildren(...sections(reply.sections));
    window.scrollTo(0, scroll);
  };
  await load();
  every(load, mine);
}

/* -- which page -------------------------------------------------------------------------------------------------------- */

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; /* not an address that we wrote: shown as it is */
  }
}

async function show() {
  const mine = ((me) => () => me === turn)(++turn);
  clearTimeout(timer);
  const [path, search] = (location.hash || "#/").split(/\?(.*)/s);
  const [, name, ...rest] = path.split("/");
  const argument = decoded(rest.join("/")), query = new URLSearchParams(search || "");
  for (const a of document.querySelectorAll("nav a")) a.classList.toggle("here", a.dataset.page === (name || "runs") || (a.dataset.page === "runs" && (name === "run" || name === "profile")));
  status("");
  delete page.dataset.ready;
  document.title = argument && name !== "sweep" ? `${argument} - windlass` : "windlass";
  try {
    if (name === "run") await runPage(argument, query, mine);
    else if (name === "sweep") await sweepPage(argument, mine);
    else if (name === "planner") await plannerPage(query, mine);
    else if (name === "data") await sectionsPage("Data ledger", "Where the text comes from and on what terms, by run.", "data", {}, mine);
    else if (name === "profile") await sectionsPage("Profile", `Traces of ${argument}.`, "profile", { id: argument }, mine);
    else await runsPage(query, mine);
    if (mine()) page.dataset.ready = name || "runs";
  } catch (error) {
    if (mine()) page.replaceChildren(el("h1", null, "No answer"), el("p", { class: "warning" }, error.message));
  }
}

/* -- keys -------------------------------------------------------------------------------------------------------------- */

const help = document.getElementById("help");
document.getElementById("keys").addEventListener("click", () => help.showModal());
const KEYS = {
  "/": () => { const filter = document.getElementById("filter"); if (filter) filter.focus(); else location.hash = "#/"; },
  "?": () => help.showModal(),
  j: () => moveRow(1),
  k: () => moveRow(-1),
  x: () => document.querySelector("#rows tr.at input")?.click(),
  Enter: () => document.querySelector("#rows tr.at a")?.click(),
  Escape: () => { if (document.querySelector("#rows tr.at")) moveRow(0); else if (location.hash.startsWith("#/run/") || location.hash.startsWith("#/profile/")) location.hash = "#/"; },
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.closest("input:not([type=checkbox]), select, textarea, button, a")) {
    if (event.key === "Escape") event.target.blur();
    if (event.target.closest("input, select, textarea") || event.key === "Enter") return;
  }
  if (!Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  KEYS[event.key]();
});

document.getElementById("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme.trim() === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
  redraw();
});
const theme = localStorage.getItem("theme");
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
window.addEventListener("hashchange", () => { window.scrollTo(0, 0); show(); }); /* another page begins at its top */
show();
