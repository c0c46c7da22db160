"""Step time and exposed communication of trainings, from their records.

python plots/step_time.py TRAINING.jsonl -o step_time.png
"""

from _command import plot, records

from topo_ar.figures import step_time

plot(__doc__, records, step_time)
