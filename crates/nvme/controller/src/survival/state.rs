//! The control state as data: a controller without its data half and the guest's memory.
//!
//! Every field has a number, by which it is found. A newer version may add fields, and reads the
//! state of an older one with the values that their absence means. Numbers are never reused for
//! another purpose. Decoded data is not trusted: [`restore`](super::restore) checks it.

use crate::formats::BlockFormat;
use crate::marks::{MAX_INLINE_RANGES, MarkedRanges, count_ranges};
use minicbor::{Decode, Encode};
use nvme::Command;
use protection::{Guard, StorageTag, Type};
use state_memory::StateError;
use zerocopy::FromBytes;

/// Version of the control state that this crate writes. A change that an older version cannot
/// skip needs a new one.
pub const STATE_VERSION: u32 = 1;
/// Oldest version of the control state's format that this program can read.
pub const STATE_OLDEST_READ: u32 = 1;

/// Control state of a controller, which a process commits to memory so that the next one can take
/// over.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct ControlState {
    /// Version of the format in which the state was written ([`STATE_VERSION`]).
    #[n(0)]
    pub version: u32,
    /// Permanent properties of the controller that the host knows.
    #[n(1)]
    pub identity: Identity,
    #[n(2)]
    pub registers: Registers,
    #[n(3)]
    pub pci: Pci,
    #[n(4)]
    pub interrupts: Interrupts,
    #[n(5)]
    pub features: FeatureValues,
    /// State of the admin queue; `None` while the controller is disabled.
    #[n(6)]
    pub admin_queue: Option<AdminQueue>,
    /// All completion queues of the controller, including that of the admin queue.
    #[n(7)]
    pub cqs: Vec<CqPlace>,
    /// All submission queues of the controller, including the admin queue.
    #[n(8)]
    pub sqs: Vec<SqPlace>,
    /// Guest addresses of the shadow doorbell and EventIdx buffers (Doorbell Buffer Config), if
    /// configured.
    #[n(9)]
    pub shadow: Option<(u64, u64)>,
    #[n(10)]
    pub commands: AdminCommands,
    #[n(11)]
    pub logs: LogState,
    /// State of a controller in a subsystem.
    #[n(12)]
    pub sharing: Option<SharingState>,
}

/// State of a controller as a member of its subsystem.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct SharingState {
    /// Host Identifier of the host that uses the controller.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub host: [u8; 16],
    /// Change Count of the ANA log page.
    #[n(1)]
    pub ana_changes: u64,
    /// ANA groups: number, state, Change Count.
    #[n(2)]
    pub groups: Vec<(u32, u8, u64)>,
    /// By NSID: number of the last reservation notice that the notification log contains.
    #[n(3)]
    pub notices: Vec<(u32, u64)>,
    /// Set Features commands of Reservation Persistence without a completion: command identifier,
    /// NSID, new value.
    #[n(4)]
    pub persistence: Vec<(u16, u32, bool)>,
}

/// Unread reservation notifications.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct NotificationState {
    /// Number of the last notification.
    #[n(0)]
    pub count: u64,
    /// Number, type and NSID of each unread one, oldest first.
    #[n(1)]
    pub waiting: Vec<(u64, u8, u32)>,
}

impl ControlState {
    /// Returns the control state in its encoded form (CBOR).
    ///
    /// # Errors
    /// [`StateError::Damaged`] when a value has no encoded form.
    pub fn encode(&self) -> Result<Vec<u8>, StateError> {
        encoded(self)
    }
}

/// Returns the encoded form (CBOR) of a part of the state.
fn encoded(part: &impl Encode<()>) -> Result<Vec<u8>, StateError> {
    minicbor::to_vec(part).map_err(|_| StateError::Damaged("a value cannot be encoded"))
}

/// Properties that do not change while a host uses the controller: they must match the
/// configuration.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Identity {
    #[n(0)]
    pub model: String,
    #[n(1)]
    pub serial: String,
    #[n(2)]
    pub subnqn: Option<String>,
    /// PCI IDs: vendor, device, subsystem vendor, subsystem and revision.
    #[n(3)]
    pub pci: (u16, u16, u16, u16, u8),
    #[n(4)]
    pub cntlid: u16,
    #[n(5)]
    pub io_queues: u16,
    #[n(6)]
    pub queue_entries: u32,
    #[n(7)]
    pub mdts: u8,
    #[n(8)]
    pub mapped_doorbells: bool,
    #[n(9)]
    pub shadow_doorbells: bool,
    #[n(10)]
    pub max_namespaces: u32,
    #[n(11)]
    pub namespaces: Vec<NamespaceIdentity>,
    /// Size of the controller memory buffer in bytes; `None` if the controller has none.
    #[n(12)]
    pub cmb_size: Option<u64>,
    /// Size of each Boot Partition in bytes; `None` if the controller has none.
    #[n(13)]
    pub boot_size: Option<u64>,
}

/// Properties of a namespace that its host knows, saved for the next process.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct NamespaceIdentity {
    #[n(0)]
    pub nsid: u32,
    #[n(1)]
    pub block_size: u32,
    /// Size of the namespace in blocks when the state was saved.
    #[n(2)]
    pub blocks: u64,
    #[cbor(n(3), with = "minicbor::bytes")]
    pub nguid: [u8; 16],
    #[cbor(n(4), with = "minicbor::bytes")]
    pub eui64: [u8; 8],
    /// Block format of the namespace; `None` if the program that saved the state did not know
    /// formats.
    #[n(5)]
    pub format: Option<FormatState>,
    /// Namespace UUID; zeroes if the program that saved the state reported none.
    #[cbor(n(6), with = "minicbor::bytes", default)]
    pub uuid: [u8; 16],
}

impl NamespaceIdentity {
    /// Returns whether the namespace's block size or metadata format differs from that in this
    /// state. An older version's state has no metadata format, which is then not compared.
    pub fn is_reformatted(&self, now: &NamespaceIdentity) -> bool {
        let known = self.format.is_some();
        self.block_size != now.block_size || known && self.format != now.format
    }
}

/// Registers in BAR0 and life-cycle state of a controller, saved for the next process.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Registers {
    #[n(0)]
    pub cc: u32,
    #[n(1)]
    pub csts: u32,
    #[n(2)]
    pub aqa: u32,
    #[n(3)]
    pub asq: u64,
    #[n(4)]
    pub acq: u64,
    /// Number of the life-cycle state, in the order of `controller::lifecycle::State`.
    #[n(5)]
    pub state: u8,
    /// Number of the shutdown state, in the order of `controller::lifecycle::Shutdown`.
    #[n(6)]
    pub shutdown: u8,
    /// Value of the register CMBMSC; `None` without a controller memory buffer.
    #[n(7)]
    pub cmbmsc: Option<u64>,
    /// Boot Partition registers: BPRSEL, BPMBL and the field BRS of BPINFO.
    #[cbor(n(8), default)]
    pub boot: (u32, u64, u8),
    /// The host has requested an NVM Subsystem Reset, which has not begun.
    #[cbor(n(9), default)]
    pub subsystem_reset: bool,
}

/// Bytes of PCI configuration space that the host can write, saved for the next process.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Pci {
    /// Offset and value of each byte that has bits writable by the host.
    #[n(0)]
    pub bytes: Vec<(u16, u8)>,
    #[n(1)]
    pub memory_was_enabled: bool,
}

/// Interrupt state of a controller, saved for the next process.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Interrupts {
    /// Vectors with a receiver, and the number under which the receiver is kept (0: it is not).
    #[n(0)]
    pub vectors: Vec<(u16, u32)>,
    /// Number under which the receiver of the INTx pin is kept (0: it is not), if it has one.
    #[n(1)]
    pub pin: Option<u32>,
    /// Whether the INTx pin is masked, by the VMM or after an interrupt.
    #[n(2)]
    pub pin_masked: bool,
    /// Interrupt mask (value of the register INTMS).
    #[n(3)]
    pub intms: u32,
}

/// Feature values of a controller, saved for the next process.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct FeatureValues {
    #[n(0)]
    pub arbitration: u32,
    /// Over-temperature and under-temperature threshold in kelvins.
    #[n(1)]
    pub thresholds: (u16, u16),
    /// Value of the Error Recovery feature of each namespace, by NSID.
    #[n(2)]
    pub error_recovery: Vec<(u32, u32)>,
    #[n(3)]
    pub write_cache: bool,
    #[n(4)]
    pub coalescing: u32,
    /// Bit mask of the interrupt vectors without coalescing: low 64 bits, then high 64 bits.
    #[n(5)]
    pub coalescing_disabled: (u64, u64),
    #[n(6)]
    pub write_atomicity: u32,
    #[n(7)]
    pub event_config: u32,
    /// Timestamp feature: value, wall-clock time in milliseconds at which it was set, and origin.
    #[n(8)]
    pub timestamp: (u64, u64, u8),
    #[cbor(n(9), with = "minicbor::bytes")]
    pub host_identifier: [u8; 16],
    /// Keep Alive Timeout in milliseconds. The next process starts the timer anew.
    #[n(10)]
    pub keep_alive: u32,
    /// Fields of the Host Behavior Support feature: ACRE, ETDAS, LBAFEE, HDISNS and CDFE.
    #[cbor(n(11), default)]
    pub host_behavior: (u8, u8, u8, u8, u16),
    /// LBA Status Information Report Interval (LSIRI) in units of 100 ms.
    #[cbor(n(12), default)]
    pub lsiri: u16,
    /// Reservation Notification Mask by NSID.
    #[cbor(n(13), default)]
    pub notification_masks: Vec<(u32, u32)>,
}

/// State of the admin queue pair, saved for the next process.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct AdminQueue {
    /// Number of admin commands fetched. Each has had its effect, or is in [`AdminCommands`].
    #[n(0)]
    pub fetched: u64,
    /// Index of the next completion queue entry to write.
    #[n(1)]
    pub tail: u32,
    #[n(2)]
    pub phase: bool,
    /// Completions that have to be posted at `tail`, in order.
    #[n(3)]
    pub posting: Vec<AdminCompletion>,
    /// Number of completions posted before those in `posting`, as counted in the queue's row.
    #[n(4)]
    pub posted: u64,
}

/// Completion of an admin command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Encode, Decode)]
pub(crate) struct AdminCompletion {
    #[n(0)]
    pub cid: u16,
    /// Status field of the completion (15 bits, without the phase tag).
    #[n(1)]
    pub status: u16,
    /// Dword 0 of the completion.
    #[n(2)]
    pub result: u32,
}

/// Completion queue of a controller: its ID, guest address and size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Encode, Decode)]
pub(crate) struct CqPlace {
    #[n(0)]
    pub qid: u16,
    #[n(1)]
    pub iova: u64,
    #[n(2)]
    pub size: u32,
    #[n(3)]
    pub vector: Option<u16>,
}

/// Submission queue of a controller: its ID, guest address and size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Encode, Decode)]
pub(crate) struct SqPlace {
    #[n(0)]
    pub qid: u16,
    #[n(1)]
    pub cqid: u16,
    #[n(2)]
    pub iova: u64,
    #[n(3)]
    pub size: u32,
}

/// Admin commands without a completion, and unreported events, saved for the next process.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct AdminCommands {
    /// Command identifiers of the Asynchronous Event Requests that wait for an event.
    #[n(0)]
    pub parked: Vec<u16>,
    /// Events that wait for an Asynchronous Event Request, as dword 0 of its completion.
    #[n(1)]
    pub pending: Vec<u32>,
    /// Bit mask of event types that were reported and whose log page the host has not read yet.
    #[n(2)]
    pub masked: u8,
    /// Waiting Abort commands: command identifier, and submission queue ID and command identifier
    /// of the target.
    #[n(3)]
    pub aborts: Vec<(u16, u16, u16)>,
    /// Waiting Delete I/O Submission Queue commands: queue ID and command identifier.
    #[n(4)]
    pub deletions: Vec<(u16, u16)>,
    /// Command identifiers of Set Features commands that have disabled the write cache and wait for
    /// the flush.
    #[n(5)]
    pub cache_flushes: Vec<u16>,
    /// Command identifiers of Doorbell Buffer Config commands in progress.
    #[n(6)]
    pub configuring: Vec<u16>,
    /// Fetched admin commands that have not begun.
    #[n(7)]
    pub held: Vec<HeldCommand>,
    /// State of Namespace Management and Namespace Attachment commands, if any is in progress.
    #[n(8)]
    pub management: Option<ManagementState>,
}

/// Submission queue entry of 64 bytes, saved for the next process.
#[derive(Clone, Copy, Debug, PartialEq, Encode, Decode)]
#[cbor(transparent)]
pub(crate) struct HeldCommand(#[cbor(n(0), with = "minicbor::bytes")] pub [u8; 64]);

impl HeldCommand {
    pub fn new(command: &Command) -> Self {
        let bytes: &[u8; 64] = zerocopy::transmute_ref!(command);
        HeldCommand(*bytes)
    }

    pub fn command(&self) -> Option<Command> {
        Command::read_from_bytes(&self.0).ok()
    }
}

/// Namespace management command in progress, and those that wait for its end.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct ManagementState {
    /// Command identifier of the management command; `None` when no completion is to be posted.
    #[n(0)]
    pub cid: Option<u16>,
    /// Task of the command: 0 for none, 1 to create, 2 to delete, 3 to attach, 4 to detach.
    #[n(1)]
    pub task: u8,
    #[n(2)]
    pub nsid: u32,
    /// Size in blocks of the namespace to create.
    #[n(3)]
    pub blocks: u64,
    #[n(4)]
    pub shared: bool,
    /// NGUIDs of the namespaces that the command concerns, 16 bytes each, in order.
    #[cbor(n(5), with = "minicbor::bytes")]
    pub nguids: Vec<u8>,
    /// Error status of the command's completion; `None` for success.
    #[n(6)]
    pub failed: Option<u16>,
    #[n(7)]
    pub waiting: Vec<HeldCommand>,
    /// Bytes of a block of a namespace to create; 0 selects the pool's first block size.
    #[cbor(n(8), default)]
    pub block_size: u32,
}

/// Log pages and counters of a controller, saved for the next process.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct LogState {
    /// Entries of the Error Information log, newest first.
    #[n(0)]
    pub errors: Vec<HeldCommand>,
    /// NSIDs of the Changed Attached Namespace List log page.
    #[n(1)]
    pub changed: Vec<u32>,
    /// Wall-clock time of power-on in milliseconds since 1970.
    #[n(2)]
    pub powered_on: u64,
    #[n(3)]
    pub counters: Counters,
    /// Telemetry snapshots. This and the following fields are `None` in states of older programs.
    #[n(4)]
    pub telemetry: Option<TelemetryState>,
    #[n(5)]
    pub self_test: Option<SelfTestState>,
    #[n(6)]
    pub erasure: Option<EraseState>,
    #[n(7)]
    pub persistent_events: Option<PersistentEventState>,
    #[n(9)]
    pub lba_status: Option<LbaStatusState>,
    #[n(10)]
    pub notifications: Option<NotificationState>,
}

/// State of the LBA Status Information log page, saved for the next process.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct LbaStatusState {
    /// Blocks marked as uncorrectable: for each NSID, ranges of first block and number of blocks.
    #[n(0)]
    pub marks: MarkedRanges,
    /// LBA Status Generation Counter of the log page.
    #[n(1)]
    pub generation: u16,
    /// Whether blocks were marked since the host has read the log page.
    #[n(2)]
    pub news: bool,
    /// Whether the host was notified of newly marked blocks.
    #[n(3)]
    pub alerted: bool,
    /// Generation and content of the log page that the host is reading in several commands.
    #[n(4)]
    pub reading: Option<(u16, MarkedRanges)>,
    /// Wall-clock time in milliseconds at which the current report interval began.
    #[n(5)]
    pub since: u64,
    /// By NSID: number of changes of the marks so far.
    #[cbor(n(6), default)]
    pub changes: Vec<(u32, u64)>,
    /// The marks and the log page are in the state memory's section of marks, because there are
    /// more than [`MAX_INLINE_RANGES`]; here they are empty.
    #[cbor(n(7), default)]
    pub elsewhere: bool,
}

/// Marks and log page that have no room in the control state.
#[derive(Debug, Default, Encode, Decode)]
#[cbor(map)]
struct ManyMarks {
    #[n(0)]
    marks: MarkedRanges,
    #[n(1)]
    reading: Option<(u16, MarkedRanges)>,
}

impl LbaStatusState {
    /// Removes marks and log page if they are too many for the control state, and returns them in
    /// the form of the section of marks.
    ///
    /// # Errors
    /// [`StateError::Damaged`] when a value has no encoded form.
    pub fn take_many(&mut self) -> Result<Option<Vec<u8>>, StateError> {
        let reading = self.reading.iter().map(|(_, marks)| count_ranges(marks));
        if count_ranges(&self.marks) + reading.sum::<usize>() <= MAX_INLINE_RANGES {
            return Ok(None);
        }
        self.elsewhere = true;
        let many = ManyMarks {
            marks: std::mem::take(&mut self.marks),
            reading: self.reading.take(),
        };
        encoded(&many).map(Some)
    }

    /// Sets marks and log page from the form of the section of marks.
    pub fn put_many(&mut self, bytes: &[u8]) -> Result<(), minicbor::decode::Error> {
        let many: ManyMarks = minicbor::decode(bytes)?;
        (self.marks, self.reading) = (many.marks, many.reading);
        Ok(())
    }
}

/// Snapshots of the telemetry log pages, saved for the next process.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct TelemetryState {
    #[n(0)]
    pub host: CapturedText,
    #[n(1)]
    pub own: CapturedText,
    /// Whether the host has yet to read the controller-initiated snapshot.
    #[n(2)]
    pub available: bool,
}

/// Text of a telemetry snapshot, with its generation number and reason.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct CapturedText {
    #[n(0)]
    pub generation: u8,
    #[n(1)]
    pub text: String,
    #[n(2)]
    pub reason: String,
}

/// State of the device self-test, saved for the next process.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct SelfTestState {
    /// Entries of the Device Self-test log page, newest first.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub results: Vec<u8>,
    #[n(1)]
    pub running: Option<TestRunning>,
}

/// Device self-test in progress, saved for the next process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct TestRunning {
    /// Self-test Code of the operation (short or extended).
    #[n(0)]
    pub code: u8,
    #[n(1)]
    pub nsid: u32,
    /// Number of reads that the self-test has completed.
    #[n(2)]
    pub done: u64,
}

/// Persistent Event log of a controller, saved for the next process.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct PersistentEventState {
    /// Persistent events of the controller, newest first.
    #[n(0)]
    pub events: Vec<SavedEvent>,
    /// Generation number of the last context that the host has established.
    #[n(1)]
    pub generation: u16,
    /// Whether the host has established a context for reading the log.
    #[n(2)]
    pub context: bool,
    /// Number of all events so far.
    #[cbor(n(3), default)]
    pub count: u64,
}

/// Persistent event: type, time and data.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct SavedEvent {
    #[n(0)]
    pub ty: u8,
    /// Value of the Timestamp feature when the event occurred.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub timestamp: [u8; 8],
    #[cbor(n(2), with = "minicbor::bytes")]
    pub data: Vec<u8>,
    /// Controller of the event; `None` in states of programs that did not save it.
    #[n(3)]
    pub cntlid: Option<u16>,
}

/// State of Format NVM and Sanitize, saved for the next process.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct EraseState {
    /// Dword 10 of the last Sanitize command that began an operation.
    #[n(0)]
    pub last: u32,
    /// Sanitize Operation Status of the Sanitize Status log page.
    #[n(1)]
    pub outcome: u8,
    /// Number of overwrite passes that the last sanitize operation has completed.
    #[n(2)]
    pub passes: u8,
    /// NSIDs of the namespaces that a failed sanitize operation has left closed.
    #[n(3)]
    pub locked: Vec<u32>,
    #[n(4)]
    pub running: Option<EraseRunning>,
}

/// Erasure in progress (Format NVM or Sanitize), saved for the next process.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct EraseRunning {
    /// Command identifier of Format NVM; `None` for Sanitize.
    #[n(0)]
    pub format: Option<u16>,
    /// Pattern of a sanitize operation by overwriting (OVRPAT).
    #[n(1)]
    pub pattern: u32,
    #[n(2)]
    pub nsids: Vec<u32>,
    /// Number of completed passes over all namespaces.
    #[n(3)]
    pub pass: u8,
    #[n(4)]
    pub at: u32,
    #[n(5)]
    pub offset: u64,
    /// Whether all blocks are erased, so that only the end of the operation is left.
    #[n(6)]
    pub over: bool,
    /// Error status of the operation (15 bits); `None` for success.
    #[n(7)]
    pub failed: Option<u16>,
    /// NSID and new block size in bytes of each namespace that gets another format.
    #[cbor(n(8), default)]
    pub changes: Vec<(u32, u32)>,
    /// Number of new formats in `changes` that are stored.
    #[cbor(n(9), default)]
    pub kept: u32,
    /// Whether a controller reset has dropped the command, so that no completion is posted.
    #[cbor(n(10), default)]
    pub abandoned: bool,
    /// Complete format of each change; empty in states of programs that supported only blocks
    /// without metadata.
    #[cbor(n(11), default)]
    pub formats: Vec<FormatState>,
}

impl EraseRunning {
    /// Returns the NSID and the new block format of each namespace that gets another format.
    pub fn changes(&self) -> Vec<(u32, BlockFormat)> {
        let mut formats = self.formats.iter();
        let format = |(nsid, block): &(u32, u32)| {
            let known = formats.next().map(BlockFormat::from);
            (*nsid, known.unwrap_or(BlockFormat::plain(*block)))
        };
        self.changes.iter().map(format).collect()
    }
}

/// Format of a namespace's blocks, saved for the next process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct FormatState {
    #[n(0)]
    pub block: u32,
    #[n(1)]
    pub metadata: u16,
    /// Size of the protection information guard in bits: 16, 32 or 64.
    #[n(2)]
    pub guard: u8,
    #[n(3)]
    pub extended: bool,
    /// Type of protection information, 1 to 3; 0 for none.
    #[n(4)]
    pub protection: u8,
    /// Whether protection information is in the first bytes of the metadata, not in the last.
    #[n(5)]
    pub first: bool,
    /// Storage tag: bits, and mask. `None`: the smallest one of the guard, as in states of
    /// programs that did not save it.
    #[n(6)]
    pub storage: Option<(u8, u64)>,
}

impl From<BlockFormat> for FormatState {
    fn from(format: BlockFormat) -> Self {
        let (kind, first) = match format.protection {
            Some((kind, first)) => (kind as u8, first),
            None => (0, false),
        };
        let StorageTag { bits, mask } = format.storage;
        let is_least = format.storage == StorageTag::least(format.guard);
        FormatState {
            block: format.block,
            metadata: format.metadata,
            guard: format.guard.bits(),
            extended: format.extended,
            protection: kind,
            first,
            storage: (!is_least).then_some((bits, mask)),
        }
    }
}

impl From<&FormatState> for BlockFormat {
    fn from(saved: &FormatState) -> Self {
        let guard = Guard::of(saved.guard).unwrap_or(Guard::Bits16);
        let storage = saved.storage.map(|(bits, mask)| StorageTag { bits, mask });
        BlockFormat {
            block: saved.block,
            metadata: saved.metadata,
            guard,
            storage: storage.unwrap_or(StorageTag::least(guard)),
            extended: saved.extended,
            protection: Type::of(saved.protection).map(|kind| (kind, saved.first)),
        }
    }
}

/// SMART and I/O counters of a controller, saved for the next process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Counters {
    #[n(0)]
    pub media_errors: u64,
    #[n(1)]
    pub error_log_entries: u64,
    #[n(2)]
    pub power_cycles: u64,
    #[n(3)]
    pub unsafe_shutdowns: u64,
    #[n(4)]
    pub reads: u64,
    #[n(5)]
    pub writes: u64,
    #[n(6)]
    pub bytes_read: u64,
    #[n(7)]
    pub bytes_written: u64,
    #[n(8)]
    pub busy_ns: u64,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)] // A test fails by a panic.
mod tests {
    use super::*;

    #[test]
    fn features_of_older_version_are_read() {
        let now = FeatureValues::default();
        let mut bytes = minicbor::to_vec(&now).unwrap();
        // A map of fourteen; those versions lacked its last values.
        let added = [
            (0xae, &[13, 0x80][..]),
            (0xad, &[12, 0]),
            (0xac, &[11, 0x85, 0, 0, 0, 0, 0]),
        ];
        for (map, last) in added {
            let rest = bytes.len() - last.len();
            assert_eq!((bytes[0], &bytes[rest..]), (map, last));
            bytes.truncate(rest);
            bytes[0] = map - 1;
            assert_eq!(minicbor::decode::<FeatureValues>(&bytes).unwrap(), now);
        }
    }

    /// Format state of programs that supported only blocks without metadata.
    #[derive(Encode)]
    #[cbor(map)]
    struct PlainFormat {
        #[n(0)]
        format: Option<u16>,
        #[n(1)]
        pattern: u32,
        #[n(2)]
        nsids: Vec<u32>,
        #[n(3)]
        pass: u8,
        #[n(4)]
        at: u32,
        #[n(5)]
        offset: u64,
        #[n(6)]
        over: bool,
        #[n(8)]
        changes: Vec<(u32, u32)>,
    }

    #[test]
    fn format_state_of_older_version_is_read() {
        let old = PlainFormat {
            format: Some(7),
            pattern: 0,
            nsids: vec![1],
            pass: 0,
            at: 0,
            offset: 512,
            over: false,
            changes: vec![(1, 4096)],
        };
        let bytes = minicbor::to_vec(old).unwrap();
        let saved: EraseRunning = minicbor::decode(&bytes).unwrap();
        assert_eq!(saved.changes(), [(1, BlockFormat::plain(4096))]);
        let format = BlockFormat {
            metadata: 16,
            guard: Guard::Bits64,
            extended: true,
            protection: Some((Type::Two, true)),
            ..BlockFormat::plain(4096)
        };
        let masked = |bits, mask| BlockFormat {
            storage: StorageTag { bits, mask },
            ..format
        };
        for format in [format, masked(48, 0xffff_0000_ffff), masked(1, 0)] {
            let new = EraseRunning {
                formats: vec![format.into()],
                ..saved.clone()
            };
            let bytes = minicbor::to_vec(&new).unwrap();
            let saved: EraseRunning = minicbor::decode(&bytes).unwrap();
            assert_eq!(saved.changes(), [(1, format)]);
        }
    }

    /// Format state of programs without storage tags.
    #[derive(Encode)]
    #[cbor(map)]
    struct Untagged {
        #[n(0)]
        block: u32,
        #[n(1)]
        metadata: u16,
        #[n(2)]
        guard: u8,
        #[n(3)]
        extended: bool,
        #[n(4)]
        protection: u8,
        #[n(5)]
        first: bool,
    }

    #[test]
    fn format_without_storage_tag_gets_smallest() {
        for guard in [Guard::Bits16, Guard::Bits32, Guard::Bits64] {
            let old = Untagged {
                block: 4096,
                metadata: 16,
                guard: guard.bits(),
                extended: true,
                protection: 2,
                first: true,
            };
            let bytes = minicbor::to_vec(old).unwrap();
            let saved: FormatState = minicbor::decode(&bytes).unwrap();
            let format = BlockFormat {
                metadata: 16,
                guard,
                storage: StorageTag::least(guard),
                extended: true,
                protection: Some((Type::Two, true)),
                ..BlockFormat::plain(4096)
            };
            assert_eq!((saved, BlockFormat::from(&saved)), (format.into(), format));
        }
    }
}
