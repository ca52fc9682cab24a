// Runs before the first paint, and whenever a theme is chosen: the chosen one, else the system's.
{
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const chosen = localStorage.getItem("loraplex-theme");
    document.documentElement.dataset.theme = chosen ?? (system.matches ? "dark" : "light");
  };
  apply();
  addEventListener("loraplex-theme", apply);
  system.addEventListener("change", () => dispatchEvent(new Event("loraplex-theme")));
}
