"""The calls that torch.distributed.checkpoint makes on planners and storage, in its order, over our own seam.

``dcp.save`` and ``dcp.load`` make the same calls with the same results. But their collectives go to the process group
directly, where a rank that has died or stopped is noticed after half an hour at best, and what they raise is no
``Exception``. Here they are control collectives of ``Comm``, and what one rank finds, all raise.
"""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from freehold.runtime.agreement import agree
from freehold.runtime.checkpoint.patience import on_all
from freehold.runtime.comm import Comm

__all__ = ["drive_load", "drive_save"]


def drive_save(comm: Comm, planner: SavePlanner, writer: StorageWriter, *, doing: str) -> None:
    """Plan a save on all ranks and hand every rank's data to its writer. Collective.

    Args:
        comm: The group; group rank 0 is the coordinator.
        planner: Must leave the items of the local plans as they are when it makes the global plan.
        writer: Likewise.
        doing: What is attempted, for messages.

    Raises:
        FreeholdError: What any rank found, on all ranks.
    """
    is_coordinator = comm.rank == 0

    planner.set_up_planner({}, writer.storage_meta(), is_coordinator)
    writer.set_up_storage_writer(is_coordinator)
    local = on_all(comm, doing, lambda: writer.prepare_local_plan(planner.create_local_plan()))
    plans = comm.gather_objects(local)
    central, metadata = [], None
    error = None
    if is_coordinator:
        try:
            central, metadata = planner.create_global_plan(plans)
            central = writer.prepare_global_plan(central)
        except Exception as found:
            error = found
    agree(comm, error, doing=doing)
    # Items come back as they were sent, so only what storage added need travel.
    assigned = comm.gather_objects([plan.storage_data for plan in central])[0][comm.rank]
    final = planner.finish_plan(replace(local, storage_data=assigned))
    results = comm.gather_objects(on_all(comm, doing, lambda: writer.write_data(final, planner).value()))
    if metadata is not None:
        writer.finish(metadata, results)


def drive_load(comm: Comm, planner: LoadPlanner, reader: StorageReader, *, doing: str) -> None:
    """Let every rank read what its planner asks for. Collective.

    Args:
        comm: The group.
        planner: Each rank plans for itself.
        reader: Each rank reads for itself.
        doing: What is attempted, for messages.

    Raises:
        FreeholdError: What any rank found, on all ranks.
    """
    on_all(comm, doing, lambda: _read(planner, reader, is_coordinator=comm.rank == 0))


def _read(planner: LoadPlanner, reader: StorageReader, *, is_coordinator: bool) -> None:
    metadata = reader.read_metadata()
    planner.set_up_planner({}, metadata, is_coordinator)
    reader.set_up_storage_reader(metadata, is_coordinator)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
