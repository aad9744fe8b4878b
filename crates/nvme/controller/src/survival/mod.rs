//! State of a controller for the process that serves its disk next.
//!
//! The data half itself records the fetched commands and those in flight (`engine::journal`). The
//! control half commits the rest of the state as a whole ([`ControlState`]), whenever it has
//! changed and before the host can see the change. A method of [`Controller`] that changes state
//! calls [`Controller::touch`], and ends with [`Controller::settle`]. The latter commits, and
//! then posts the completions of admin commands, which wait for it. An admin command therefore
//! takes effect once: a process that dies before the commit has not executed it, and the next one
//! fetches it again. A process that dies later leaves the completion in the committed state, to
//! be posted unless it is in the queue already.
//!
//! The windows of guest memory are a table of their own, because there may be many. A window is
//! added when it is mapped, and removed when no command in flight can touch it any more.

mod clock;
mod error;
mod restore;
mod save;
pub(crate) mod state;
pub(crate) mod stream;

pub(crate) use clock::{Since, wall_ms};
pub use error::RestoreError;
pub use restore::{ShownIdentity, ShownNamespace, shown_identity};
pub use state::{STATE_OLDEST_READ, STATE_VERSION};
pub use stream::MAX_STREAM;

use crate::config::ControllerConfig;
use crate::control::Controller;
use crate::irq::IrqSink;
use dma::{Memory, Prot};
use state::ControlState;
use state_memory::{Control, KeptMemory, KeptWindow, Layout, StateError, StateMemory, WindowTable};
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Access to objects kept outside of the process, by their numbers in the state memory.
pub trait RetainedObjects {
    /// Maps the memory file of this number: at least `end` bytes, writable if `writable`. The
    /// memory knows its number ([`Memory::set_kept`]). Returns `None` when the file is not there.
    fn memory(&mut self, number: NonZeroU32, end: u64, writable: bool) -> Option<Memory>;

    /// Returns the interrupt receiver of this number ([`IrqSink::kept`]), or `None` when it is
    /// not there.
    fn receiver(&mut self, number: NonZeroU32) -> Option<Arc<dyn IrqSink>>;

    /// Returns the file of the controller memory buffer ([`Controller::cmb_pages`]), or `None`
    /// when it is not there.
    fn memory_buffer(&mut self) -> Option<OwnedFd> {
        None
    }
}

/// Returns the size of the state memory for a controller of this configuration. The caller sets
/// windows, descriptors and the session.
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

/// Maximum time between commits of I/O counters to the state memory, while the worker is active.
const COUNTERS: Duration = Duration::from_secs(1);

/// State memory of a controller, and the control half's changes that are not committed to it yet.
pub(crate) struct Survival {
    state: StateMemory,
    control: Control,
    /// Section of marked ranges that have no room in the control state, if the memory has one.
    marks: Option<Control>,
    windows: WindowTable,
    /// Windows that were unmapped, as ranges of addresses: commands in flight may touch them.
    leaving: Vec<(u64, u64)>,
    /// Whether the control state may have changed since the last commit.
    dirty: bool,
    /// Time of the last commit that the change of I/O counters has caused.
    counted: Option<Instant>,
    /// Whether the state could not be written, so that no process can take over.
    lost: bool,
    /// Whether the guest migrates, so that no process can take over meanwhile.
    suspended: bool,
}

impl Survival {
    pub fn new(state: StateMemory) -> Result<Self, StateError> {
        Ok(Survival {
            control: state.control(),
            marks: state.marks(),
            windows: state.windows()?,
            leaving: Vec::new(),
            dirty: true,
            counted: None,
            lost: false,
            suspended: false,
            state,
        })
    }

    fn windows(&self) -> impl Iterator<Item = KeptWindow> {
        self.windows.iter()
    }

    /// Withdraws the state memory's content after a failed write, so that no process takes over
    /// from it.
    fn lose(&mut self, error: &StateError) {
        self.control.withdraw();
        if !std::mem::replace(&mut self.lost, true) {
            tracing::error!(%error, "the disk no longer survives this process");
        }
    }

    /// Withdraws the state memory's content, or has it committed again.
    pub(crate) fn suspend(&mut self, suspended: bool) {
        self.suspended = suspended;
        if suspended {
            self.control.withdraw();
        } else {
            self.dirty = true;
        }
    }

    /// Records a window of guest memory in the state memory, from which the next process maps it
    /// again.
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

    /// Removes the unmapped windows from the state memory, after the last command that could access
    /// them.
    fn forget_leaving(&mut self) {
        for (first, last) in std::mem::take(&mut self.leaving) {
            self.windows.remove_range(first, last);
        }
    }

    /// Returns whether the control state may have changed since the last commit.
    #[inline]
    pub fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// Commits the control state. After a failure, no process takes over.
    pub fn commit(&mut self, state: ControlState) {
        self.dirty = false;
        if !self.lost
            && !self.suspended
            && let Err(error) = self.commit_parts(state)
        {
            self.lose(&error);
        }
    }

    /// Commits marked ranges that need their own section, and then the rest. A process that dies in
    /// between leaves newer marks beside an older control state. That is harmless, because the
    /// commands that changed the marks have not completed, and are executed again.
    fn commit_parts(&mut self, mut state: ControlState) -> Result<(), StateError> {
        if let Some(lba_status) = &mut state.logs.lba_status
            && let Some(many) = lba_status.take_many()?
        {
            let section = self.marks.as_mut().ok_or(StateError::OutOfRange)?;
            section.commit(&many)?;
            crash::point!("controller.mark.saved");
        }
        self.control.commit(&state.encode()?)
    }
}

impl Controller {
    /// Returns whether another process can take over from this one.
    pub fn survives(&self) -> bool {
        self.survival.as_ref().is_some_and(|s| !s.lost)
    }

    /// Returns whether as many marked ranges can be kept as the program's limit permits.
    pub(crate) fn saves_many_marks(&self) -> bool {
        self.survival.as_ref().is_none_or(|s| s.marks.is_some())
    }

    /// Returns whether the next process needs the object kept under this number: a window's
    /// memory, or a receiver of interrupts.
    pub fn needs_kept(&self, number: NonZeroU32) -> bool {
        let windows = self.survival.as_ref().map(|survival| &survival.windows);
        windows.is_some_and(|windows| windows.needs(number)) || self.engine.irqs.needs(number)
    }

    /// Marks the control state as changed, so that the next round commits it.
    #[inline]
    pub(crate) fn touch(&mut self) {
        if let Some(survival) = &mut self.survival {
            survival.dirty = true;
        }
    }

    /// Marks the counters as changed from time to time, not for each command: a killed process
    /// loses its most recent counts.
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

    /// Records a window of guest memory that every engine has mapped, for the next process.
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

    /// Records that the windows between the addresses `first` and `last` (inclusive) were unmapped.
    pub(crate) fn note_unmapped(&mut self, first: u64, last: u64) {
        if let Some(survival) = &mut self.survival {
            survival.leaving.push((first, last));
        }
    }

    /// Removes the records of unmapped windows that no outstanding command can access any more.
    pub(crate) fn note_quiesced(&mut self) {
        if let Some(survival) = &mut self.survival
            && !survival.leaving.is_empty()
        {
            survival.forget_leaving();
        }
    }

    /// Makes room for the records of a share's commands. Returns `false` when there is none.
    pub(crate) fn prepare_records(&self, share: u16) -> bool {
        match &self.survival {
            Some(survival) => survival.state.records(share).is_ok(),
            None => true,
        }
    }

    /// Returns the encoded control state, as it would be committed now.
    #[doc(hidden)]
    pub fn saved(&self) -> Result<Vec<u8>, StateError> {
        self.control_state().encode()
    }
}
