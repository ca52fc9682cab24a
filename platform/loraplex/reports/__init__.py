"""Reports of simulations, plans and load tests: one HTML file that loads nothing."""
