//! The options of the process.

use super::super::{Flag, Row, Spec};
use super::{socket_group, socket_mode, socket_owner};
use crate::spec::{MAX_WORKERS, ProcessSpec};

/// Without a flag: what it is the default of has the flag.
const fn only_in_file<S>(row: Row<S>) -> Row<S> {
    Row { serve: None, ..row }
}

/// A flag of whatever serves.
const fn both<S>(row: Row<S>) -> Row<S> {
    let flag = Flag::overrides(row.key);
    row.serve(flag).ublk(flag)
}

impl Spec for ProcessSpec {
    const TABLE: &'static str = "[process]";
    const NAMES: &'static str = "processes";
    const ROWS: &'static [Row<Self>] = &[
        both(
            Row::<Self>::new(
                "idle-window",
                "MICROSECONDS",
                "poll for this long after the last work before sleeping: microseconds, or auto, \
                 from 20 to 1000 as the load has it",
                |p| &mut p.idle_window,
            )
            .or("auto"),
        ),
        both(
            Row::<Self>::new(
                "pin-memory",
                "on|off",
                "pin guests' memory (and ublk's buffers) for the kernel's I/O to files and block \
                 devices (io_uring's fixed buffers): less work for each request; all of the memory \
                 is allocated soon after it was attached, counts against the limit of locked \
                 memory (ulimit -l) unless root, and must not be reclaimed by a balloon",
                |p| &mut p.pin_memory,
            )
            .or("off"),
        ),
        both(
            Row::<Self>::new(
                "sqpoll",
                "on|off",
                "let a thread of the kernel take each thread's requests to files and block devices \
                 (io_uring's SQPOLL): no system call to submit, for one more CPU that is busy \
                 while there is work",
                |p| &mut p.sqpoll,
            )
            .or("off"),
        ),
        Row::<Self>::new(
            "workers",
            "N",
            "worker threads: controllers, exports and queues of block devices are assigned to them \
             in turn, and a controller's queues migrate to those that have time",
            |p| &mut p.workers,
        )
        .range(1, MAX_WORKERS as u32)
        .or("1")
        .serve(Flag::overrides("workers"))
        .ublk(Flag::overrides("workers").help(
            "worker threads: queues are assigned to them in turn \
             [default: one for each queue of a device]",
        )),
        Row::<Self>::new(
            "spread",
            "MODE",
            "what becomes of a controller's queues where there are several workers",
            |p| &mut p.spread,
        )
        .or("auto")
        .serve(Flag::overrides("spread")),
        both(
            Row::<Self>::new(
                "cpus",
                "LIST",
                "CPUs to pin the workers to, one each, like 2,3 or 0-3",
                |p| &mut p.cpus,
            )
            .or("not pinned"),
        ),
        both(
            Row::<Self>::new(
                "stop-timeout",
                "SECONDS",
                "at the end, how long to wait for volumes that may hang (FUSE, network file \
                 systems) and answer nothing, and for a worker that makes no round; then the \
                 process ends without them, with exit code 3. Disks of this machine are waited for \
                 until nothing of them has completed for a minute",
                |p| &mut p.stop_timeout,
            )
            .range(1, 3600)
            .or("4"),
        ),
        both(
            Row::<Self>::new(
                "previous-timeout",
                "SECONDS",
                "how long a file or block device is waited for, at the beginning, whose previous \
                 process was killed and has left requests that the kernel still works on: a late \
                 one would undo what is written now",
                |p| &mut p.previous_timeout,
            )
            .range(1, 86_400)
            .or("30"),
        ),
        Row::<Self>::new(
            "client-windows",
            "N",
            "windows of guest memory that a client of a controller may map at a time; it is told \
             so (max_dma_maps)",
            |p| &mut p.client_windows,
        )
        .range(1, 65_535)
        .or("65535")
        .serve(Flag::overrides("client-windows")),
        Row::<Self>::new(
            "client-memory",
            "SIZE",
            "largest sum of the sizes of one client's memory files",
            |p| &mut p.client_memory,
        )
        .or("4T")
        .serve(Flag::overrides("client-memory")),
        Row::<Self>::new(
            "client-files",
            "N",
            "memory files that one client may have mapped at a time",
            |p| &mut p.client_files,
        )
        .range(1, 16_384)
        .or("512")
        .serve(Flag::overrides("client-files")),
        Row::<Self>::new(
            "client-connects",
            "N",
            "clients that each socket, the control socket too, accepts in a second; more wait \
             until they may come in",
            |p| &mut p.client_connects,
        )
        .range(1, 1_000_000)
        .or("50")
        .serve(Flag::overrides("client-connects")),
        only_in_file(socket_owner(|p| &mut p.access.owner)),
        only_in_file(socket_group(|p| &mut p.access.group)),
        only_in_file(socket_mode(|p| &mut p.access.mode)),
        Row::<Self>::new(
            "control",
            "PATH",
            "control socket: where \"vnvme list\", stats and the other commands for a running \
             process ask; none: there is none. VNVME_CONTROL says the same",
            |p| &mut p.control,
        )
        .or("control.sock in RUNTIME_DIRECTORY, or /run/vnvme for root, or vnvme in XDG_RUNTIME_DIR")
        .serve(Flag::overrides("control"))
        .ublk(Flag::overrides("control")),
        both(Row::<Self>::new(
            "metrics",
            "ADDRESS:PORT",
            "IP address and TCP port where Prometheus may read /metrics, and nothing else; so may \
             everybody who can connect there",
            |p| &mut p.metrics,
        )),
        both(Row::<Self>::new(
            "control-group",
            "GROUP",
            "group, by name or number, whose members may ask questions and change nothing: at a \
             socket beside the control socket whose name has -ro before its end",
            |p| &mut p.control_group,
        )),
        both(
            Row::<Self>::new(
                "sandbox",
                "MODE",
                "give up, once everything is open, what serving does not need: other files, the \
                 network, capabilities, most system calls",
                |p| &mut p.sandbox,
            )
            .or("on"),
        ),
        both(
            Row::<Self>::new(
                "keeper",
                "MODE",
                "process: a process of its own keeps the sockets and the memory of NVMe disks' \
                 clients, and starts the process that serves them again when that is killed or \
                 fails: guests notice a pause (docs/survival.md). systemd: the service's store of \
                 descriptors (FileDescriptorStoreMax=) keeps them. auto: systemd where it has one for \
                 this service, else process; off where there are block devices of the host (ublk), or \
                 the configuration is no file",
                |p| &mut p.keeper,
            )
            .or("auto"),
        ),
        Row::<Self>::new(
            "allow",
            "LIST",
            "under vnvme daemon: folders below which files may be opened, and sockets be made, \
             while it runs; NBD servers and NVMe/TCP portals to connect to, as URLs; \"ublk\" allows \
             block devices of the host, with all of /dev. Without it, only disks that need no file \
             can be added in the sandbox",
            |p| &mut p.allow,
        )
        .or("nothing")
        .daemon(Flag::overrides("allow")),
        Row::<Self>::new(
            "state",
            "PATH",
            "under vnvme daemon: file in which disks are kept that were added while it runs, so \
             that they are there after a restart; beside it is the folder with the records of \
             all disks (PATH with the ending .disks)",
            |p| &mut p.state,
        )
        .or("they are forgotten")
        .daemon(Flag::overrides("state")),
        both(
            Row::<Self>::new(
                "identity",
                "RULE",
                "source of default serial numbers and identifiers. machine: the volume's own \
                 identifier, or this machine's ID with the volume's path; random for volumes in \
                 memory. path: the volume's path or size alone, as in earlier versions",
                |p| &mut p.identity,
            )
            .or("machine"),
        ),
    ];
}
