"""The commands of ``fastdata``, a file for each, and what they share. Nothing imports this wing.

__main__.py     the command line
bench.py        published recipes by torchvision and by fastdata
tune.py         the fastest settings of a loader, found by coordinate ascent
judge.py        probes of settings, and which of two wins
tune_result.py  the probes as a table, with the call to paste
diagnose.py     the parts of a training loop and its loader, measured
diagnosis.py    the limit of a loop and the advice, derived from the figures
timed_loop.py   a loop that is timed from the outside, also in a script
doctor.py       checks of this machine
build.py        a cache, prepared from a folder
inspect.py      the contents of caches, and whether they are sound
prune.py        caches that no run can use, removed
measure.py      samples a second of a loader, in a forked process
recipes.py      published transforms, and the user's own by name
photos.py       drawn images
arguments.py    arguments of several commands
figures.py      figures as JSON, with versions and machine
"""
