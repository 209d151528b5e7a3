# ranks 2; expect AR205; says local[-_]rank; guilty; args --local-rank=0
"""C104: the parser knows --local_rank only, and is given --local-rank."""
import argparse
from job import mark

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)  #@guilty
mark()
parser.parse_args()
