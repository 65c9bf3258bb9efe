"""Record what a run did, and read it back.

`events.py` has the one file of events and is the place to begin. `segments.py` joins the events of a process group.
`counts.py` counts packs, steps, epochs and runs; `account.py` writes the counts of an epoch. `losses.py`, `folder.py`
and `pack_log.py` read the other files of a run; `run_steps.py` leads from an optimizer step to its packs. `report.py`,
with `over_time.py` and `left_out.py`, is what `vlpack report` shows; `summary.py` is what the log says before the first
step and after the last one. Nothing here imports torch or ms-swift.
"""
