// Turns each .math element of the page into KaTeX's HTML and MathML.
// A formula that KaTeX cannot read stays visible, in red, and carries the class katex-error.
for (const element of document.querySelectorAll(".math")) {
  katex.render(element.textContent, element, {
    displayMode: element.tagName === "DIV",
    throwOnError: false,
  });
}
