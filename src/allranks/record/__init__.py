"""What is each process of the job doing? The mapped record, the probe that fills it, and the run directory."""
