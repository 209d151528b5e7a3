"""Which settings make this script quickest on this machine? Trials in processes of their own, and a search that stops early."""
