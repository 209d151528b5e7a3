"""Checkpoints: saved while training goes on, never half there, read without running code."""

from allranks.ckpt.checkpoints import Checkpoints, Saved, Session, load, save
from allranks.ckpt.finding import Found, Problem, find_latest, list_folders, parse_folder, verify
from allranks.ckpt.into_module import load_weights, put_weights
from allranks.ckpt.keys import Fit, does_not_fit, fit
from allranks.ckpt.manifest import Manifest
from allranks.ckpt.randomness import random_states, restore_random_states
from allranks.ckpt.reading import Checkpoint
from allranks.ckpt.retention import Retention
from allranks.ckpt.stores import Store, open_store
from allranks.ckpt.writing import Snapshot

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "Fit",
    "Found",
    "Manifest",
    "Problem",
    "Retention",
    "Saved",
    "Session",
    "Snapshot",
    "Store",
    "does_not_fit",
    "find_latest",
    "fit",
    "list_folders",
    "load",
    "load_weights",
    "open_store",
    "parse_folder",
    "put_weights",
    "random_states",
    "restore_random_states",
    "save",
    "verify",
]
