"""What notebooks and the recorder need around the core: timing, evidence, plots, drawings, recordings."""
