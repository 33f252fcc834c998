"""Reward functions of the doctor's patients; imported in worker processes, so it imports nothing of ours."""

import time


def fair(spec, text):
    return float(text == spec["answer"])


def sleeps(spec, text):
    time.sleep(600)


def wordy(spec, text):
    return "yes"


def mute(spec, text):
    return None


def blind(spec, text):
    return 0.5


def squeamish(spec, text):
    return float(int(text) == int(spec["answer"]))
