// Cells of wide tables know the heads of their columns, which site.css shows on a telephone.

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".bd-article table")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    if (heads.length < 3) continue;

    table.classList.add("as-list");
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => {
        if (column && heads[column] && cell.textContent.trim()) cell.dataset.label = heads[column];
      });
    }
  }
});
