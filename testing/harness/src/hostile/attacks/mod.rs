//! The attacks, each a loop that runs until it is stopped; one table names them all.
//!
//! An attack is a process of its own. It may fail, be disconnected or be killed at any time: then
//! it begins again. It reports the number of attempts that it has completed.

mod admin;
mod connections;
mod control;
mod interrupts;
mod linger;
mod memory;
mod messages;
mod resets;
mod silent;
mod virtio;
mod volume;
mod work;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;

use super::test_daemon;

/// State of an attack.
pub(super) struct Context {
    /// Directory of the sockets.
    pub(super) dir: PathBuf,
    /// The attack is to end.
    pub(super) stop: AtomicBool,
    /// Number of completed attempts.
    pub(super) done: AtomicU64,
    /// The attack has seconds, not parts of one.
    pub(super) long: bool,
}

impl Context {
    fn running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// Counts; answers whether to go on.
    fn did(&self, count: u64) -> bool {
        self.done.fetch_add(count, Ordering::Relaxed);
        self.running()
    }

    /// Does nothing more until the end.
    fn rest(&self) {
        while self.running() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn nvme(&self) -> PathBuf {
        test_daemon::bad_socket(&self.dir)
    }

    fn vhost(&self) -> PathBuf {
        test_daemon::vhost_socket(&self.dir)
    }

    fn control(&self) -> PathBuf {
        test_daemon::control_socket(&self.dir)
    }
}

/// The use that an attack makes of a FUSE file system.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fuse {
    /// No use.
    No,
    /// The client has files there.
    Files,
    /// A volume is there.
    Volume,
}

/// Preparation before the daemon starts; the returned files are kept open until the end.
type Preparation = fn(&Path) -> Result<Vec<std::fs::File>>;
/// Check after the daemon has ended.
type After = fn(&Path) -> Result<()>;

/// An attack.
#[derive(Clone, Copy)]
pub(super) struct Attack {
    pub(super) name: &'static str,
    /// Description for people.
    pub(super) what: &'static str,
    pub(super) run: fn(&Context) -> Result<()>,
    /// The attack aims at the worker's own waiting: none may be blocked for more than 10 ms.
    pub(super) waiting: bool,
    pub(super) fuse: Fuse,
    pub(super) before: Option<Preparation>,
    pub(super) after: Option<After>,
}

const fn attack(name: &'static str, run: fn(&Context) -> Result<()>, what: &'static str) -> Attack {
    Attack {
        name,
        what,
        run,
        waiting: false,
        fuse: Fuse::No,
        before: None,
        after: None,
    }
}

const fn waiting(
    name: &'static str,
    run: fn(&Context) -> Result<()>,
    what: &'static str,
) -> Attack {
    Attack {
        waiting: true,
        ..attack(name, run, what)
    }
}

const fn on_fuse(
    name: &'static str,
    fuse: Fuse,
    run: fn(&Context) -> Result<()>,
    what: &'static str,
) -> Attack {
    Attack {
        fuse,
        ..waiting(name, run, what)
    }
}

/// All of them.
pub(super) const ATTACKS: &[Attack] = &[
    waiting(
        "linger-dma-map",
        linger::dma_map,
        "DMA_MAP of a TCP socket whose close waits",
    ),
    waiting(
        "linger-before-version",
        linger::before_version,
        "the same socket before VERSION",
    ),
    waiting(
        "linger-second-client",
        linger::second_client,
        "the same from a second client, which is refused",
    ),
    waiting(
        "linger-set-irqs",
        linger::set_irqs,
        "the same socket as an interrupt",
    ),
    waiting(
        "linger-unread",
        linger::unread,
        "the same in messages that nobody reads any more",
    ),
    waiting(
        "linger-vhost",
        linger::vhost,
        "the same in messages of vhost-user",
    ),
    waiting(
        "linger-control",
        linger::control,
        "the same at the control socket",
    ),
    on_fuse(
        "silent-dma-map",
        Fuse::Files,
        silent::dma_map,
        "DMA_MAP of a file whose FUSE server is silent",
    ),
    on_fuse(
        "silent-set-irqs",
        Fuse::Files,
        silent::set_irqs,
        "such a file as an interrupt, and before VERSION",
    ),
    on_fuse(
        "silent-vhost",
        Fuse::Files,
        silent::vhost,
        "such a file in messages of vhost-user",
    ),
    on_fuse(
        "silent-overlay",
        Fuse::Files,
        silent::overlay,
        "a submission queue in a file of overlayfs over FUSE",
    ),
    on_fuse(
        "silent-volume",
        Fuse::Volume,
        volume::silent,
        "reads and writes of a volume whose file hangs",
    ),
    attack(
        "huge-memfds",
        memory::huge,
        "sparse memory files, as many and as large as the address space holds",
    ),
    attack(
        "huge-memfds-vhost",
        memory::huge_vhost,
        "the same in messages of vhost-user",
    ),
    waiting(
        "eventfd-blocks",
        interrupts::nvme,
        "an interrupt that lost O_NONBLOCK, with a full counter",
    ),
    waiting(
        "eventfd-blocks-vhost",
        interrupts::vhost,
        "the same as a virtqueue's call",
    ),
    attack(
        "eventfd-kick",
        interrupts::kick,
        "a virtqueue's kick that is rung without end",
    ),
    attack(
        "eventfd-semaphore",
        interrupts::semaphore,
        "a kick that is readable as often as a counter of 64 bits has values",
    ),
    attack(
        "tiny-windows",
        memory::tiny_windows,
        "windows of a byte, and transfers over thousands of them",
    ),
    attack(
        "many-windows",
        memory::many_windows,
        "as many windows as there may be, unmapped all at once, again and again",
    ),
    attack(
        "many-files",
        memory::many_files,
        "thousands of memory files, until no descriptor or mapping is left",
    ),
    attack(
        "shrinking-memory",
        memory::shrinking,
        "memory that is truncated under commands in flight",
    ),
    waiting(
        "punched-memory",
        memory::punched,
        "memory that is punched by the gigabyte under commands in flight",
    ),
    attack(
        "connect-storm",
        connections::storm,
        "clients that connect and go",
    ),
    attack(
        "garbage-storm",
        connections::garbage,
        "clients that connect, say nonsense and go",
    ),
    attack(
        "crowd",
        connections::crowd,
        "hundreds of clients at once, at every socket",
    ),
    attack(
        "gone-in-mid-io",
        connections::gone,
        "clients that go with thousands of commands in flight",
    ),
    attack(
        "long-sgls",
        work::long_sgls,
        "16 queues of SGLs of 8192 descriptors",
    ),
    attack(
        "deep-file",
        work::deep_file,
        "16 queues of plain 4 KiB reads of a file",
    ),
    attack(
        "deep-memory",
        work::deep_memory,
        "16 queues of 128 KiB reads of memory",
    ),
    attack(
        "zeroes",
        work::zeroes,
        "Write Zeroes of 32 MiB and Dataset Management of 256 ranges on memory",
    ),
    attack(
        "punch",
        work::punch,
        "memory that is filled and punched by the gigabyte",
    ),
    attack(
        "compare",
        work::compare,
        "Compare and Verify of all sizes on 16 queues",
    ),
    attack(
        "flushes",
        work::flushes,
        "Flush and FUA writes of a file on 16 queues",
    ),
    attack(
        "bad-commands",
        work::bad_commands,
        "16 queues of commands that are errors",
    ),
    attack(
        "irq-flood",
        messages::set_irqs,
        "SET_IRQS with 16 eventfds, without end",
    ),
    attack(
        "read-flood",
        messages::region_reads,
        "register reads, without end",
    ),
    attack(
        "map-flood",
        messages::map_unmap,
        "DMA_MAP and DMA_UNMAP, without end",
    ),
    attack(
        "doorbell-flood",
        messages::doorbells,
        "doorbells by message, with any value",
    ),
    attack(
        "half-messages",
        messages::half,
        "messages that end in the middle",
    ),
    attack(
        "huge-messages",
        messages::huge,
        "messages that say they are as long as can be",
    ),
    attack(
        "never-reads",
        messages::never_reads,
        "questions whose answers are never read",
    ),
    attack(
        "state-messages",
        messages::state,
        "messages about migration, dirty pages and unknown commands",
    ),
    attack(
        "admin-flood",
        admin::flood,
        "Identify, Get Log Page, features and events, without end",
    ),
    attack("abort-flood", admin::aborts, "Abort, without end"),
    attack(
        "queue-loop",
        admin::queues,
        "queues that are made and deleted, without end",
    ),
    attack(
        "reset-storm",
        resets::resets,
        "resets by message, with commands in flight",
    ),
    attack(
        "enable-storm",
        resets::enables,
        "the controller enabled and disabled, with commands in flight",
    ),
    attack(
        "flr-storm",
        resets::flr,
        "function level resets, Bus Master and power states",
    ),
    attack(
        "vhost-chains",
        virtio::chains,
        "indirect chains of as many pieces as there may be",
    ),
    attack(
        "vhost-discard",
        virtio::discard,
        "discard and write-zeroes of as much as there may be",
    ),
    attack(
        "vhost-messages",
        virtio::messages,
        "messages of vhost-user, without end",
    ),
    attack(
        "vhost-tables",
        virtio::tables,
        "memory tables and slots that come and go, without end",
    ),
    attack(
        "vhost-half",
        virtio::half,
        "half messages and answers that are never read",
    ),
    attack(
        "control-slow",
        control::slow,
        "control clients that say a byte a second",
    ),
    attack(
        "control-crowd",
        control::crowd,
        "a thousand control clients at once",
    ),
    attack(
        "control-garbage",
        control::garbage,
        "control requests that are none",
    ),
    attack(
        "control-pipeline",
        control::pipeline,
        "control requests one behind the other, without end",
    ),
    attack(
        "control-unread",
        control::unread,
        "control clients that go before the answer, and listeners that never read",
    ),
    Attack {
        after: Some(control::is_still_there),
        ..attack(
            "control-replaced",
            control::replace,
            "the control socket's path is given to somebody's file",
        )
    },
    Attack {
        before: Some(control::lock_directory),
        ..attack(
            "directory-locked",
            control::nothing,
            "the sockets' directory is locked by another user",
        )
    },
];
