"""Does a script train on many ranks as on one? `allranks parity` runs it twice and names the first update, tensor and cause that differ.

startup, listening, loaders -> recorder -> writer        in each rank of the two runs
recording -> compare -> causes, conclude -> report       afterwards, without torch
"""
