"""How taps travel from the pipeline stages to the draft."""
