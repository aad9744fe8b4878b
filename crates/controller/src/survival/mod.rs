//! What a controller leaves to the process that serves its disk next.
//!
//! The data half writes by itself what it has fetched and what is in flight (`engine::journal`).
//! Everything else that a controller is, the control half commits as a whole
//! ([`ControlState`]), whenever it has changed and before the host can see that: a method of
//! [`Controller`] that changes something says so ([`Controller::touch`]), and ends with
//! [`Controller::settle`]. That commits, and then posts the completions of admin commands, which
//! wait for it. So an admin command takes effect once: a process that dies before the commit has
//! not executed it, and the next one fetches it again; one that dies after it leaves the completion
//! in the committed state, to be posted unless it is in the queue already.
//!
//! The windows of guest memory are a table of their own, for there may be many: one comes into it
//! when it is mapped, and leaves it when nothing in flight can touch it any more.

mod clock;
mod error;
mod restore;
mod save;
pub(crate) mod state;

pub(crate) use clock::{Since, wall_ms};
pub use error::RestoreError;
pub use restore::serial_number_in;
pub use state::{STATE_OLDEST_READ, STATE_VERSION};

use crate::config::ControllerConfig;
use crate::controller::Controller;
use crate::irq::IrqSink;
use dma::{Memory, Prot};
use nvme::Status;
use state::{ControlState, Ending};
use state_memory::{Control, KeptMemory, KeptWindow, Layout, StateError, StateMemory, WindowTable};
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is kept outside of the process, by the numbers that the state memory has for it.
pub trait Kept {
    /// The memory file of this number, mapped: `end` bytes of it at least, for writing too if
    /// `writable`. It knows its number ([`Memory::set_kept`]). `None`: it is not there.
    fn memory(&mut self, number: NonZeroU32, end: u64, writable: bool) -> Option<Memory>;

    /// The receiver of interrupts of this number ([`IrqSink::kept`]). `None`: it is not there.
    fn receiver(&mut self, number: NonZeroU32) -> Option<Arc<dyn IrqSink>>;

    /// The file of the controller memory buffer ([`Controller::cmb_pages`]). `None`: it is not
    /// there.
    fn memory_buffer(&mut self) -> Option<OwnedFd> {
        None
    }
}

/// What a state memory must have room for, of a controller that is configured like this. Windows,
/// descriptors and the session are for the caller to say.
pub fn state_layout(config: &ControllerConfig) -> Layout {
    Layout {
        queues: config.io_queues.saturating_add(1),
        shares: config.workers.max(1),
        commands: config.max_in_flight,
        windows: 65_535,
        descriptors: 4096,
        session: 0,
    }
}

/// Counters of I/O are committed after this time at the latest, while there are rounds.
const COUNTERS: Duration = Duration::from_secs(1);

/// The control half's way into the state memory.
pub(crate) struct Survival {
    state: StateMemory,
    control: Control,
    windows: WindowTable,
    /// Windows that were unmapped, as ranges of addresses: commands in flight may touch them.
    leaving: Vec<(u64, u64)>,
    /// Something has changed since the last commit, perhaps.
    dirty: bool,
    /// When the counters of I/O were committed last, which nothing else has committed.
    counted: Option<Instant>,
    /// The state could not be written: the next process finds none.
    lost: bool,
}

impl Survival {
    pub fn new(state: StateMemory) -> Result<Self, StateError> {
        Ok(Survival {
            control: state.control(),
            windows: state.windows()?,
            leaving: Vec::new(),
            dirty: true,
            counted: None,
            lost: false,
            state,
        })
    }

    fn windows(&self) -> impl Iterator<Item = KeptWindow> {
        self.windows.iter()
    }

    /// The state cannot be written any more.
    fn lose(&mut self, error: &StateError) {
        self.control.withdraw();
        if !std::mem::replace(&mut self.lost, true) {
            tracing::error!(%error, "from now on the disk ends with this process");
        }
    }

    /// A window was mapped.
    fn mapped(&mut self, iova: u64, len: u64, backing: Option<&(Memory, u64)>, prot: Prot) {
        self.forget_leaving();
        let memory = backing.map(|(memory, offset)| KeptMemory {
            number: memory.kept(),
            offset: *offset,
        });
        let window = KeptWindow {
            iova,
            len,
            read: prot.read,
            write: prot.write,
            memory,
        };
        if let Err(error) = self.windows.add(&window) {
            self.lose(&error);
        }
    }

    /// Nothing in flight touches any more what was unmapped.
    fn forget_leaving(&mut self) {
        for (first, last) in std::mem::take(&mut self.leaving) {
            self.windows.remove_range(first, last);
        }
    }

    fn commit(&mut self, state: &ControlState) {
        self.dirty = false;
        if !self.lost
            && let Err(error) = self.control.commit(&state.encode())
        {
            self.lose(&error);
        }
    }
}

impl Controller {
    /// Another process can go on where this one ends.
    pub fn survives(&self) -> bool {
        self.survival.as_ref().is_some_and(|s| !s.lost)
    }

    /// The next process needs what is kept under this number: a window's memory, or a receiver of
    /// interrupts.
    pub fn needs_kept(&self, number: NonZeroU32) -> bool {
        let windows = self.survival.as_ref().map(|survival| &survival.windows);
        windows.is_some_and(|windows| windows.needs(number)) || self.engine.irqs.needs(number)
    }

    /// Something changes that the next process has to know.
    #[inline]
    pub(crate) fn touch(&mut self) {
        if let Some(survival) = &mut self.survival {
            survival.dirty = true;
        }
    }

    /// Counters of I/O are committed now and then, not for each command: a process that is killed
    /// takes those of its last moments with it.
    #[inline]
    pub(crate) fn touch_counters(&mut self) {
        if let Some(survival) = &mut self.survival {
            let since = survival
                .counted
                .map(|at| self.now.saturating_duration_since(at));
            if since.is_none_or(|since| since >= COUNTERS) {
                survival.counted = Some(self.now);
                survival.dirty = true;
            }
        }
    }

    /// Ends an admin command: its completion is posted when its effect is committed.
    pub(crate) fn finish_admin(&mut self, cid: u16, status: Status, result: u32) {
        self.touch();
        self.admin.rearm();
        self.endings.push(Ending {
            cid,
            status: status.into_bits(),
            result,
        });
    }

    /// What has changed is committed, and then the host may see it.
    #[inline]
    pub(crate) fn settle(&mut self) {
        if self.survival.as_ref().is_some_and(|s| s.dirty) {
            self.commit();
        }
        if !self.endings.is_empty() {
            self.post_endings();
        }
    }

    #[cold]
    fn commit(&mut self) {
        crash::point!("controller.commit.before");
        let state = self.control_state();
        if let Some(survival) = &mut self.survival {
            survival.commit(&state);
        }
        self.marks_committed();
        crash::point!("controller.commit.after");
    }

    fn post_endings(&mut self) {
        for Ending {
            cid,
            status,
            result,
        } in std::mem::take(&mut self.endings)
        {
            let status = Status::from_bits(status);
            self.engine.finish(0, cid, status, result);
            crash::point!("controller.admin.posted");
        }
    }

    /// Guest memory was mapped, in every engine.
    pub(crate) fn note_mapped(
        &mut self,
        iova: u64,
        len: u64,
        backing: Option<&(Memory, u64)>,
        prot: Prot,
    ) {
        if let Some(survival) = &mut self.survival {
            survival.mapped(iova, len, backing, prot);
        }
    }

    /// Windows in a range of addresses, both ends inclusive, were unmapped.
    pub(crate) fn note_unmapped(&mut self, first: u64, last: u64) {
        if let Some(survival) = &mut self.survival {
            survival.leaving.push((first, last));
        }
    }

    /// Nothing in flight touches any more what was unmapped.
    pub(crate) fn note_quiesced(&mut self) {
        if let Some(survival) = &mut self.survival
            && !survival.leaving.is_empty()
        {
            survival.forget_leaving();
        }
    }

    /// Makes room for the records of a share's commands. `false`: there is none.
    pub(crate) fn prepare_records(&self, share: u16) -> bool {
        match &self.survival {
            Some(survival) => survival.state.records(share).is_ok(),
            None => true,
        }
    }

    /// The control state as it is committed now.
    #[doc(hidden)]
    pub fn saved(&self) -> Vec<u8> {
        self.control_state().encode()
    }
}
