// On pages that list error texts: a field for what was printed, which leaves the rows that fit.
// A "..." in a listed text stands for anything.

const PAGES = /\/(troubleshooting|mistakes)\.html$/;
const FITS = 0.6; // share of a text's words that the printed one must have, if it does not fit whole

function pattern(text) {
  const parts = text.split("...").map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return new RegExp(parts.join("[\\s\\S]*?"));
}

function words(text) {
  return text.toLowerCase().match(/[\w.]*\w/g) ?? [];
}

function sharedWords(text, printed) {
  const wanted = words(text);
  const given = new Set(words(printed));
  return wanted.filter((word) => given.has(word)).length / Math.max(1, wanted.length);
}

function errorRows() {
  const rows = [];
  for (const row of document.querySelectorAll(".bd-article tbody tr")) {
    const codes = [...row.querySelectorAll("code")].map((code) => code.textContent);
    const text = codes.sort((one, other) => other.length - one.length)[0];
    if (text) rows.push({ row, text, pattern: pattern(text) });
  }
  return rows;
}

function show(rows, printed, output) {
  const asked = printed.trim().replace(/\s+/g, " ");
  let fitting = rows.filter((entry) => entry.pattern.test(asked));
  if (!fitting.length) fitting = rows.filter((entry) => sharedWords(entry.text, asked) >= FITS);

  for (const entry of rows) entry.row.hidden = asked !== "" && !fitting.includes(entry);
  for (const table of document.querySelectorAll(".bd-article table")) {
    const section = table.closest("section section") ?? table;
    section.hidden = [...table.querySelectorAll("tbody tr")].every((row) => row.hidden);
  }
  const introduction = document.querySelector(".find-error ~ ul");
  if (introduction) introduction.hidden = asked !== "";

  if (!asked) output.textContent = "";
  else if (fitting.length) output.textContent = `Texts that fit: ${fitting.length}`;
  else output.textContent = "No text of this page fits. The message itself says what to do.";
}

document.addEventListener("DOMContentLoaded", () => {
  const heading = document.querySelector(".bd-article h1");
  if (!PAGES.test(location.pathname) || !heading) return;

  const box = document.createElement("div");
  box.className = "find-error";
  box.innerHTML =
    '<label for="printed">What was printed?</label><textarea id="printed"></textarea><output></output>';
  heading.nextElementSibling.after(box);

  const rows = errorRows();
  box.querySelector("textarea").addEventListener("input", (event) =>
    show(rows, event.target.value, box.querySelector("output"))
  );
});
