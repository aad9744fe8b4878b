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
use zerocopy::FromBytes;

/// Version of the control state that this crate writes. A change that an older version cannot
/// skip needs a new one.
pub const STATE_VERSION: u32 = 1;
/// The oldest version of the control state that this crate reads.
pub const STATE_OLDEST_READ: u32 = 1;

/// The state that the control half commits.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct ControlState {
    /// [`STATE_VERSION`] of the writer.
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
    /// State of the admin queue, if the controller is enabled.
    #[n(6)]
    pub admin_queue: Option<AdminQueue>,
    /// Completion queues, the admin queue included.
    #[n(7)]
    pub cqs: Vec<CqPlace>,
    /// Submission queues, the admin queue included.
    #[n(8)]
    pub sqs: Vec<SqPlace>,
    /// Doorbell Buffer Config: addresses of shadow doorbells and EventIdx.
    #[n(9)]
    pub shadow: Option<(u64, u64)>,
    #[n(10)]
    pub commands: AdminCommands,
    #[n(11)]
    pub logs: LogState,
}

impl ControlState {
    /// Returns the encoded state.
    pub fn encode(&self) -> Vec<u8> {
        // Encoding to memory cannot fail, and every value here can be encoded.
        minicbor::to_vec(self).unwrap_or_default()
    }
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
    /// Vendor, device, subsystem vendor, subsystem, revision.
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
    /// Size of the controller memory buffer in bytes.
    #[n(12)]
    pub cmb_size: Option<u64>,
    /// Size of each Boot Partition in bytes.
    #[n(13)]
    pub boot_size: Option<u64>,
}

/// A namespace that the host finds.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct NamespaceIdentity {
    #[n(0)]
    pub nsid: u32,
    #[n(1)]
    pub block_size: u32,
    /// Size in blocks, which may have changed since.
    #[n(2)]
    pub blocks: u64,
    #[cbor(n(3), with = "minicbor::bytes")]
    pub nguid: [u8; 16],
    #[cbor(n(4), with = "minicbor::bytes")]
    pub eui64: [u8; 8],
    /// Format of the namespace; `None` in states of programs that did not save it.
    #[n(5)]
    pub format: Option<FormatState>,
    /// Zeroes in states of programs that showed none.
    #[cbor(n(6), with = "minicbor::bytes", default)]
    pub uuid: [u8; 16],
}

impl NamespaceIdentity {
    /// Returns whether the blocks have another format now, as far as this state contains the
    /// format.
    pub fn is_reformatted(&self, now: &NamespaceIdentity) -> bool {
        let known = self.format.is_some();
        self.block_size != now.block_size || known && self.format != now.format
    }
}

/// Registers of BAR0, and the life-cycle state.
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
    /// `controller::lifecycle::State`, in its order.
    #[n(5)]
    pub state: u8,
    /// `controller::lifecycle::Shutdown`, in its order.
    #[n(6)]
    pub shutdown: u8,
    /// CMBMSC, where there is a controller memory buffer.
    #[n(7)]
    pub cmbmsc: Option<u64>,
    /// Boot Partitions: BPRSEL, BPMBL, BPINFO.BRS.
    #[cbor(n(8), default)]
    pub boot: (u32, u64, u8),
    /// The host has requested an NVM Subsystem Reset, which has not begun.
    #[cbor(n(9), default)]
    pub subsystem_reset: bool,
}

/// Configuration space, as far as the host can write it.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Pci {
    /// Offset and value of the bytes with bits that the host may write.
    #[n(0)]
    pub bytes: Vec<(u16, u8)>,
    #[n(1)]
    pub memory_was_enabled: bool,
}

/// Interrupts and their receivers.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Interrupts {
    /// Vectors with a receiver, and the number under which the receiver is kept (0: it is not).
    #[n(0)]
    pub vectors: Vec<(u16, u32)>,
    /// Number under which the receiver of the INTx pin is kept (0: it is not), if it has one.
    #[n(1)]
    pub pin: Option<u32>,
    /// The pin is masked, by the VMM or by itself.
    #[n(2)]
    pub pin_masked: bool,
    /// INTMS.
    #[n(3)]
    pub intms: u32,
}

/// Values of the features.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct FeatureValues {
    #[n(0)]
    pub arbitration: u32,
    /// Thresholds: over, under.
    #[n(1)]
    pub thresholds: (u16, u16),
    /// Error recovery by NSID.
    #[n(2)]
    pub error_recovery: Vec<(u32, u32)>,
    #[n(3)]
    pub write_cache: bool,
    #[n(4)]
    pub coalescing: u32,
    /// Bits of the vectors, low and high.
    #[n(5)]
    pub coalescing_disabled: (u64, u64),
    #[n(6)]
    pub write_atomicity: u32,
    #[n(7)]
    pub event_config: u32,
    /// Value, wall-clock time in ms of the value, origin.
    #[n(8)]
    pub timestamp: (u64, u64, u8),
    #[cbor(n(9), with = "minicbor::bytes")]
    pub host_identifier: [u8; 16],
    /// Keep Alive Timer in milliseconds; the timer is restarted.
    #[n(10)]
    pub keep_alive: u32,
    /// Host Behavior Support: ACRE, ETDAS, LBAFEE, HDISNS, CDFE.
    #[cbor(n(11), default)]
    pub host_behavior: (u8, u8, u8, u8, u16),
    /// LBA Status Information Report Interval, in units of 100 ms.
    #[cbor(n(12), default)]
    pub lsiri: u16,
}

/// State of the admin queue.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct AdminQueue {
    /// Commands fetched: all of them have had their effect, or are in [`AdminCommands`].
    #[n(0)]
    pub fetched: u64,
    /// Position of the next completion, with the phase.
    #[n(1)]
    pub tail: u32,
    #[n(2)]
    pub phase: bool,
    /// Completions to be posted there, in order.
    #[n(3)]
    pub posting: Vec<AdminCompletion>,
    /// Completions posted before these, as counted beside the rings.
    #[n(4)]
    pub posted: u64,
}

/// Completion of an admin command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Encode, Decode)]
pub(crate) struct AdminCompletion {
    #[n(0)]
    pub cid: u16,
    /// Status, 15 bits.
    #[n(1)]
    pub status: u16,
    /// Dword 0.
    #[n(2)]
    pub result: u32,
}

/// Location of a completion queue.
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

/// Location of a submission queue.
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

/// Admin commands without a completion, and the events they wait for.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct AdminCommands {
    /// Asynchronous Event Requests that are parked.
    #[n(0)]
    pub parked: Vec<u16>,
    /// Events that wait for a request, as dword 0.
    #[n(1)]
    pub pending: Vec<u32>,
    /// Event types that were reported and not read.
    #[n(2)]
    pub masked: u8,
    /// Abort commands: their CID, then queue and CID of the target.
    #[n(3)]
    pub aborts: Vec<(u16, u16, u16)>,
    /// Delete I/O Submission Queue commands: queue, CID.
    #[n(4)]
    pub deletions: Vec<(u16, u16)>,
    /// Set Features commands that turned the write cache off.
    #[n(5)]
    pub cache_flushes: Vec<u16>,
    /// Doorbell Buffer Config commands.
    #[n(6)]
    pub configuring: Vec<u16>,
    /// Complete commands that have not begun.
    #[n(7)]
    pub held: Vec<HeldCommand>,
    /// State of Namespace Management and Namespace Attachment.
    #[n(8)]
    pub management: Option<ManagementState>,
}

/// A submission queue entry.
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

/// The current namespace management command, and those that wait for it.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct ManagementState {
    /// CID of the command; `None`: no completion is posted.
    #[n(0)]
    pub cid: Option<u16>,
    /// Task: 0 none, 1 create, 2 delete, 3 attach, 4 detach.
    #[n(1)]
    pub task: u8,
    #[n(2)]
    pub nsid: u32,
    /// Size in blocks of a namespace to create.
    #[n(3)]
    pub blocks: u64,
    #[n(4)]
    pub shared: bool,
    /// NGUIDs of the namespaces concerned, in order, 16 bytes each.
    #[cbor(n(5), with = "minicbor::bytes")]
    pub nguids: Vec<u8>,
    /// Status at the end.
    #[n(6)]
    pub failed: Option<u16>,
    #[n(7)]
    pub waiting: Vec<HeldCommand>,
    /// Bytes of a block of a namespace to create; 0 selects the pool's first block size.
    #[cbor(n(8), default)]
    pub block_size: u32,
}

/// Logs and counters that the host can read.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct LogState {
    /// Error Information entries, newest first.
    #[n(0)]
    pub errors: Vec<HeldCommand>,
    /// Changed Attached Namespace List.
    #[n(1)]
    pub changed: Vec<u32>,
    /// Wall-clock time in ms at power-on.
    #[n(2)]
    pub powered_on: u64,
    #[n(3)]
    pub counters: Counters,
    /// `None` in states of programs without it; the same holds for the following fields.
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
}

/// Marked blocks, and the host's read position in the log page.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct LbaStatusState {
    /// By NSID: first block and number of blocks.
    #[n(0)]
    pub marks: MarkedRanges,
    /// LBA Status Generation Counter.
    #[n(1)]
    pub generation: u16,
    /// Blocks were marked since the log page was read.
    #[n(2)]
    pub news: bool,
    /// The host was notified of that.
    #[n(3)]
    pub alerted: bool,
    /// The log page, as it is being read: generation and marks.
    #[n(4)]
    pub reading: Option<(u16, MarkedRanges)>,
    /// Wall-clock time in ms when the report interval began.
    #[n(5)]
    pub since: u64,
    /// The marks and the log page are in the state memory's section of marks, because there are
    /// more than [`MAX_INLINE_RANGES`]; here they are empty.
    #[n(6)]
    #[cbor(default)]
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
    pub fn take_many(&mut self) -> Option<Vec<u8>> {
        let reading = self.reading.as_ref().map(|(_, marks)| count_ranges(marks));
        if count_ranges(&self.marks) + reading.unwrap_or(0) <= MAX_INLINE_RANGES {
            return None;
        }
        self.elsewhere = true;
        let many = ManyMarks {
            marks: std::mem::take(&mut self.marks),
            reading: self.reading.take(),
        };
        // Encoding to memory cannot fail.
        Some(minicbor::to_vec(&many).unwrap_or_default())
    }

    /// Sets marks and log page from the form of the section of marks.
    pub fn put_many(&mut self, bytes: &[u8]) -> Result<(), minicbor::decode::Error> {
        let many: ManyMarks = minicbor::decode(bytes)?;
        (self.marks, self.reading) = (many.marks, many.reading);
        Ok(())
    }
}

/// Content of the telemetry logs.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct TelemetryState {
    #[n(0)]
    pub host: CapturedText,
    #[n(1)]
    pub own: CapturedText,
    /// The host has not read the controller's own snapshot.
    #[n(2)]
    pub available: bool,
}

/// A telemetry snapshot.
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

/// The self-test.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct SelfTestState {
    /// Entries of the log page, newest first.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub results: Vec<u8>,
    #[n(1)]
    pub running: Option<TestRunning>,
}

/// The operation in progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct TestRunning {
    /// Self-test Code.
    #[n(0)]
    pub code: u8,
    #[n(1)]
    pub nsid: u32,
    /// Number of pieces that were read.
    #[n(2)]
    pub done: u64,
}

/// The Persistent Event log.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct PersistentEventState {
    /// Events, newest first.
    #[n(0)]
    pub events: Vec<SavedEvent>,
    /// Generation of the last context.
    #[n(1)]
    pub generation: u16,
    /// Whether there is a context.
    #[n(2)]
    pub context: bool,
}

/// A persistent event.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct SavedEvent {
    #[n(0)]
    pub ty: u8,
    /// Value of the Timestamp feature.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub timestamp: [u8; 8],
    #[cbor(n(2), with = "minicbor::bytes")]
    pub data: Vec<u8>,
}

/// State of Format NVM and Sanitize.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct EraseState {
    /// Dword 10 of the last Sanitize command that began an operation.
    #[n(0)]
    pub last: u32,
    /// Sanitize Operation Status.
    #[n(1)]
    pub outcome: u8,
    /// Overwrite passes that the operation completed.
    #[n(2)]
    pub passes: u8,
    /// Namespaces that a failed operation has left closed.
    #[n(3)]
    pub locked: Vec<u32>,
    #[n(4)]
    pub running: Option<EraseRunning>,
}

/// A running erasure.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct EraseRunning {
    /// CID of Format NVM; `None` for Sanitize.
    #[n(0)]
    pub format: Option<u16>,
    /// Overwrite Pattern.
    #[n(1)]
    pub pattern: u32,
    #[n(2)]
    pub nsids: Vec<u32>,
    /// Progress: passes, index of the namespace, bytes of that.
    #[n(3)]
    pub pass: u8,
    #[n(4)]
    pub at: u32,
    #[n(5)]
    pub offset: u64,
    /// The erasure itself is done.
    #[n(6)]
    pub over: bool,
    /// Status, 15 bits.
    #[n(7)]
    pub failed: Option<u16>,
    /// Namespaces that get another format, and the bytes of their blocks.
    #[cbor(n(8), default)]
    pub changes: Vec<(u32, u32)>,
    /// Number of these changes that are stored.
    #[cbor(n(9), default)]
    pub kept: u32,
    /// A reset has dropped the command: no completion is posted.
    #[cbor(n(10), default)]
    pub abandoned: bool,
    /// Complete format of each change; empty in states of programs that supported only blocks
    /// without metadata.
    #[cbor(n(11), default)]
    pub formats: Vec<FormatState>,
}

impl EraseRunning {
    /// Returns the namespaces that get another format, and their formats.
    pub fn changes(&self) -> Vec<(u32, BlockFormat)> {
        let mut formats = self.formats.iter();
        let format = |(nsid, block): &(u32, u32)| {
            let known = formats.next().map(BlockFormat::from);
            (*nsid, known.unwrap_or(BlockFormat::plain(*block)))
        };
        self.changes.iter().map(format).collect()
    }
}

/// Format of a namespace's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct FormatState {
    #[n(0)]
    pub block: u32,
    #[n(1)]
    pub metadata: u16,
    /// Bits of the guard.
    #[n(2)]
    pub guard: u8,
    #[n(3)]
    pub extended: bool,
    /// Type of protection information, 0 for none.
    #[n(4)]
    pub protection: u8,
    /// Whether it is in the first bytes of the metadata.
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

/// SMART's counters.
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
        // A map of thirteen; those versions lacked its last values.
        for (map, last) in [(0xad, &[12, 0][..]), (0xac, &[11, 0x85, 0, 0, 0, 0, 0])] {
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
