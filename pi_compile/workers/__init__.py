"""Many processes on one build: tasks in a folder that all share, claimed, kept alive and taken over.

Workers know nothing of each other but files: no server, no lock, no clock is shared. `docs/how-to/workers.md` is for
users.
"""

from pi_compile.workers.tasks import StageDoneError, WorkFolder, failures_in, work_folder
from pi_compile.workers.worker import HEARTBEAT, LONE, PATIENCE, Rank, Worker, rank_of, silence, workers_in
