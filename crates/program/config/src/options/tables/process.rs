//! Options of the process.

use super::super::{Flag, Row, Spec};
use super::{socket_group, socket_mode, socket_owner};
use crate::spec::{MAX_WORKERS, ProcessSpec};

/// Returns the option without its flag of `vnvme serve`, which another table defines.
const fn only_in_file<S>(row: Row<S>) -> Row<S> {
    Row { serve: None, ..row }
}

/// Returns the option with a flag of all commands that serve disks.
const fn both<S>(row: Row<S>) -> Row<S> {
    let flag = Flag::overrides(row.key);
    row.serve(flag).ublk(flag)
}

impl Spec for ProcessSpec {
    const TABLE: &'static str = "[process]";
    const NAMES: &'static str = "processes";
    const ABOUT: &'static str = "Options of the process; at most one table. Its socket options are defaults for sockets \
         without their own.";
    const ROWS: &'static [Row<Self>] = &[
        both(
            Row::<Self>::new(
                "idle-window",
                "MICROSECONDS",
                "polling time after the last work before a worker sleeps: microseconds, or auto \
                 for 20 to 1000 depending on the load",
                |p| &mut p.idle_window,
            )
            .or("auto"),
        ),
        Row::<Self>::new(
            "max-poll-interval",
            "MICROSECONDS",
            "longest interval between two polls of idle guests with doorbells=mapped, whose \
             doorbells wake no worker; the interval grows with the idle time. 0: poll without \
             pause, which occupies a CPU",
            |p| &mut p.max_poll_interval,
        )
        .range(0, 1_000_000)
        .or("5000")
        .serve(Flag::overrides("max-poll-interval")),
        both(
            Row::<Self>::new(
                "pin-memory",
                "on|off",
                "register guest memory (and buffers of ublk) with io_uring as fixed buffers, for \
                 less work in each request to files and block devices. All of the memory is \
                 allocated soon after it is attached, counts against the locked-memory limit \
                 (ulimit -l) except for root, and cannot be reclaimed by a balloon",
                |p| &mut p.pin_memory,
            )
            .or("off"),
        ),
        both(
            Row::<Self>::new(
                "sqpoll",
                "on|off",
                "submit requests to files and block devices through a kernel thread for each \
                 worker (io_uring's SQPOLL): saves the system call, occupies one more CPU while \
                 there is work",
                |p| &mut p.sqpoll,
            )
            .or("off"),
        ),
        Row::<Self>::new(
            "workers",
            "N",
            "number of worker threads. Controllers, exports and queues of block devices are \
             assigned in turn; queues of a controller migrate to idle workers",
            |p| &mut p.workers,
        )
        .range(1, MAX_WORKERS as u32)
        .or("1")
        .serve(Flag::overrides("workers"))
        .ublk(Flag::overrides("workers").help(
            "number of worker threads; queues are assigned to them in turn [default: one for each \
             queue of a device]",
        )),
        Row::<Self>::new(
            "spread",
            "MODE",
            "migration of a controller's queues between workers",
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
                "time to wait at the end for volumes that may hang (FUSE, network file systems) \
                 without an answer, and for a stuck worker; then the process exits with code 3. \
                 Local disks are waited for as long as requests complete, at least one in a minute",
                |p| &mut p.stop_timeout,
            )
            .range(1, 3600)
            .or("4"),
        ),
        both(
            Row::<Self>::new(
                "previous-timeout",
                "SECONDS",
                "time to wait at start-up for a file or block device on which the kernel still \
                 executes requests of a killed process; a late one would undo newer writes",
                |p| &mut p.previous_timeout,
            )
            .range(1, 86_400)
            .or("30"),
        ),
        Row::<Self>::new(
            "client-windows",
            "N",
            "maximum number of guest memory windows mapped for a client of a controller \
             (max_dma_maps)",
            |p| &mut p.client_windows,
        )
        .range(1, 65_535)
        .or("65535")
        .serve(Flag::overrides("client-windows")),
        Row::<Self>::new(
            "client-memory",
            "SIZE",
            "maximum total size of a client's memory files",
            |p| &mut p.client_memory,
        )
        .or("4T")
        .serve(Flag::overrides("client-memory")),
        Row::<Self>::new(
            "client-files",
            "N",
            "maximum number of memory files mapped for a client",
            |p| &mut p.client_files,
        )
        .range(1, 16_384)
        .or("512")
        .serve(Flag::overrides("client-files")),
        Row::<Self>::new(
            "client-connects",
            "N",
            "clients that each socket, including the control socket, accepts in a second; further \
             clients wait",
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
            "control socket, for \"vnvme list\" and the other commands for a running process; none \
             disables it. Also set by VNVME_CONTROL",
            |p| &mut p.control,
        )
        .or(
            "control.sock in RUNTIME_DIRECTORY, in /run/vnvme for root, or in vnvme below \
             XDG_RUNTIME_DIR",
        )
        .serve(Flag::overrides("control"))
        .ublk(Flag::overrides("control")),
        both(Row::<Self>::new(
            "metrics",
            "ADDRESS:PORT",
            "IP address and TCP port at which Prometheus may read /metrics; open to everyone who \
             can connect",
            |p| &mut p.metrics,
        )),
        both(Row::<Self>::new(
            "control-group",
            "GROUP",
            "group, a name or number, with read-only access, through a socket beside the control \
             socket whose name ends in -ro before its extension",
            |p| &mut p.control_group,
        )),
        both(
            Row::<Self>::new(
                "sandbox",
                "MODE",
                "after start-up, give up access to other files, the network, capabilities and most \
                 system calls",
                |p| &mut p.sandbox,
            )
            .or("on"),
        ),
        both(
            Row::<Self>::new(
                "keeper",
                "MODE",
                "holder of sockets and guest memory of NVMe disks while the serving process \
                 restarts after a failure or upgrade, which guests notice as a pause \
                 (docs/survival.md). process: a separate process, which also restarts the serving \
                 one. systemd: the service's descriptor store (FileDescriptorStoreMax=). auto: \
                 systemd if the service has a store, otherwise process; off with block devices of \
                 the host (ublk), and with a configuration that is no file",
                |p| &mut p.keeper,
            )
            .or("auto"),
        ),
        Row::<Self>::new(
            "allow",
            "LIST",
            "under vnvme daemon: folders for files and sockets of disks added at run time, and \
             URLs of NBD servers and NVMe/TCP portals to connect to. \"ublk\" allows block devices \
             of the host, and with them all of /dev. Without this option, the sandbox permits only \
             added disks that need no file",
            |p| &mut p.allow,
        )
        .or("nothing")
        .daemon(Flag::overrides("allow")),
        Row::<Self>::new(
            "state",
            "PATH",
            "under vnvme daemon: file of the disks added at run time, which restores them after a \
             restart; the folder beside it (PATH with the ending .disks) has the records of all disks",
            |p| &mut p.state,
        )
        .or("added disks are forgotten")
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
