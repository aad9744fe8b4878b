//! State of a controller as a stream of bytes, for the live migration of its guest.
//!
//! The stream contains the control state, as the next process of a disk gets it, and the positions
//! of the queues, of which no command is outstanding. Guest memory and receivers of interrupts are
//! the VMM's business.
//!
//! ```text
//! magic (8) | version (4) | length (4) | CRC-32 of the payload (4) | payload (CBOR)
//! ```
//!
//! The stream comes from the VMM of the destination, which may have written it itself. It restores
//! only what the destination's configuration allows: identity, namespaces and formats must be
//! equal, and nothing of subsystems, pools, reservations, zones or erasures is read from it.

use super::RestoreError;
use super::state::{ControlState, Identity, STATE_OLDEST_READ, STATE_VERSION};
use crate::config::MAX_IO_QUEUES;
use crate::marks::{MAX_RANGES, MarkedRanges, count_ranges};
use minicbor::{Decode, Decoder, Encode};

/// Version of the stream that this crate writes.
const VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"vnvmeMIG";
const HEADER: usize = 20;
/// Maximum size of a stream in bytes. That is twice the room of a state in the state memory: parts
/// of a forged stream may take ten times their size when they are decoded.
pub const MAX_STREAM: usize = 1 << 20;
/// Maximum number of queue pairs, that of the admin queue included.
const MAX_QUEUES: usize = MAX_IO_QUEUES as usize + 1;

/// Payload of a stream.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct MovedState {
    #[n(0)]
    pub control: ControlState,
    /// All queues of the controller.
    #[cbor(n(1), decode_with = "few_queues")]
    pub queues: Vec<MovedQueue>,
}

/// Position of a queue pair.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct MovedQueue {
    #[n(0)]
    pub qid: u16,
    #[n(1)]
    pub sq: Option<MovedSq>,
    #[n(2)]
    pub cq: Option<MovedCq>,
}

/// Position of a submission queue.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct MovedSq {
    /// Value of the doorbell register.
    #[n(0)]
    pub doorbell: u32,
    /// Number of commands fetched from the queue since its creation.
    #[n(1)]
    pub fetched: u64,
    /// Whether the host uses the shadow doorbell.
    #[n(2)]
    pub shadow_live: bool,
    /// Last value of the shadow doorbell that was read.
    #[n(3)]
    pub seen: u32,
    /// Value of the doorbell register that is no new tail.
    #[n(4)]
    pub register: Option<u32>,
}

/// Position of a completion queue.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct MovedCq {
    /// Value of the doorbell register.
    #[n(0)]
    pub doorbell: u32,
    /// Index of the next entry to write.
    #[n(1)]
    pub tail: u32,
    #[n(2)]
    pub phase: bool,
    /// Index of the first entry that the host has not consumed, as far as known.
    #[n(3)]
    pub head: u32,
    /// Whether the host uses the shadow doorbell.
    #[n(4)]
    pub shadow_live: bool,
    /// Last value of the shadow doorbell that was read.
    #[n(5)]
    pub seen: u32,
    /// Value of the doorbell register that is no new head.
    #[n(6)]
    pub register: Option<u32>,
    /// Whether the memory was never mapped since the queue's creation.
    #[n(7)]
    pub is_stale: bool,
}

/// Decodes the queues, as long as they are not more than a controller can have.
fn few_queues<'b, C>(
    from: &mut Decoder<'b>,
    context: &mut C,
) -> Result<Vec<MovedQueue>, minicbor::decode::Error> {
    let queues = from.array_iter_with(context)?;
    let queues: Vec<MovedQueue> = queues.take(MAX_QUEUES + 1).collect::<Result<_, _>>()?;
    if queues.len() > MAX_QUEUES {
        return Err(minicbor::decode::Error::message("it has too many queues"));
    }
    Ok(queues)
}

fn damaged(why: &str) -> RestoreError {
    RestoreError::Form(why.into())
}

/// Returns whether these ranges can be marked in the namespaces of this identity. Their order
/// bounds the size of the log page.
fn fits(marks: &MarkedRanges, identity: &Identity) -> bool {
    let are_there = marks.iter().all(|(nsid, ranges)| {
        let mut all = identity.namespaces.iter();
        let ns = all.find(|ns| ns.nsid == *nsid);
        let blocks = ns.map_or(0, |ns| ns.blocks);
        let end = ranges.iter().try_fold(0, |end, (slba, blocks)| {
            slba.checked_add(*blocks).filter(|_| *slba >= end)
        });
        ns.is_some() && end.is_some_and(|end| end <= blocks)
    });
    are_there && marks.len() <= identity.namespaces.len() && count_ranges(marks) <= MAX_RANGES
}

impl MovedState {
    /// Returns the stream.
    ///
    /// # Errors
    /// [`RestoreError::Form`] when the state is too large.
    pub fn encode(&self) -> Result<Vec<u8>, RestoreError> {
        let payload =
            minicbor::to_vec(self).map_err(|error| RestoreError::Form(error.to_string()))?;
        if payload.len() > MAX_STREAM - HEADER {
            return Err(damaged("it is too large"));
        }
        let length = payload.len() as u32;
        let mut stream = MAGIC.to_vec();
        for number in [VERSION, length, crc32fast::hash(&payload)] {
            stream.extend_from_slice(&number.to_le_bytes());
        }
        stream.extend_from_slice(&payload);
        Ok(stream)
    }

    /// Removes what concerns other namespaces than those of the destination with this identity, and
    /// a log page that its host cannot be reading.
    ///
    /// # Errors
    /// [`RestoreError::Contradiction`] for more queues or marks than such a controller can have.
    pub fn limit(&mut self, identity: &Identity) -> Result<(), RestoreError> {
        if self.queues.len() > usize::from(identity.io_queues) + 1 {
            let why = "it has more queues than there can be";
            return Err(RestoreError::Contradiction(why));
        }
        let is_there = |nsid: u32| identity.namespaces.iter().any(|ns| ns.nsid == nsid);
        let features = &mut self.control.features;
        features.error_recovery.retain(|(nsid, _)| is_there(*nsid));
        let masks = &mut features.notification_masks;
        masks.retain(|(nsid, _)| is_there(*nsid));
        let Some(status) = &mut self.control.logs.lba_status else {
            return Ok(());
        };
        status.reading.take_if(|(_, marks)| !fits(marks, identity));
        status.marks.retain(|(nsid, _)| is_there(*nsid));
        let most = identity.namespaces.len();
        if status.marks.len() > most || count_ranges(&status.marks) > MAX_RANGES {
            let why = "it has more marked blocks than there can be";
            return Err(RestoreError::Contradiction(why));
        }
        Ok(())
    }

    /// Parses a complete stream.
    ///
    /// # Errors
    /// [`RestoreError::TooNew`] for a later version, [`RestoreError::Form`] for bytes that are no
    /// stream.
    pub fn decode(stream: &[u8]) -> Result<Self, RestoreError> {
        let (header, payload) = stream
            .split_first_chunk::<HEADER>()
            .ok_or_else(|| damaged("it is incomplete"))?;
        let [magic @ .., v0, v1, v2, v3, l0, l1, l2, l3, c0, c1, c2, c3] = *header;
        if magic != MAGIC {
            return Err(damaged("it is not the state of a vnvme disk"));
        }
        let version = u32::from_le_bytes([v0, v1, v2, v3]);
        if version > VERSION {
            return Err(RestoreError::TooNew { version });
        }
        if version == 0 {
            return Err(damaged("its version is none"));
        }
        let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if payload.len() != length || length > MAX_STREAM {
            return Err(damaged("it is incomplete, or too long"));
        }
        if crc32fast::hash(payload) != u32::from_le_bytes([c0, c1, c2, c3]) {
            return Err(damaged("its checksum is wrong"));
        }
        let state: MovedState =
            minicbor::decode(payload).map_err(|error| RestoreError::Form(error.to_string()))?;
        match state.control.version {
            STATE_OLDEST_READ..=STATE_VERSION => Ok(state),
            version if version > STATE_VERSION => Err(RestoreError::TooNew { version }),
            _ => Err(RestoreError::Contradiction("its version is none")),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)] // A test fails by a panic.
mod tests {
    use super::*;
    use crate::config::{ControllerConfig, NamespaceConfig};
    use crate::control::Controller;
    use std::sync::Arc;
    use volume::{Io, IoOptions, MemVolume};

    fn state() -> MovedState {
        MovedState {
            control: ControlState {
                version: STATE_VERSION,
                ..ControlState::default()
            },
            queues: vec![MovedQueue {
                qid: 1,
                sq: Some(MovedSq::default()),
                cq: None,
            }],
        }
    }

    #[test]
    fn every_damaged_stream_is_refused() {
        let stream = state().encode().unwrap();
        assert_eq!(MovedState::decode(&stream).unwrap(), state());
        for len in 0..stream.len() {
            MovedState::decode(&stream[..len]).unwrap_err();
        }
        for at in 0..stream.len() {
            let mut broken = stream.clone();
            broken[at] ^= 0x10;
            MovedState::decode(&broken).unwrap_err();
        }
        let longer = [&stream[..], &[0]].concat();
        MovedState::decode(&longer).unwrap_err();
    }

    const BLOCKS: u64 = 512;

    /// A stopped controller without a host.
    fn stopped() -> Controller {
        let config = ControllerConfig {
            io_queues: 4,
            ..ControllerConfig::default()
        };
        let volume = Arc::new(MemVolume::new(BLOCKS * 512).unwrap());
        let ns = NamespaceConfig {
            block_size: 512,
            nguid: [1; 16],
            ..NamespaceConfig::new(1, volume)
        };
        let io = Io::new(IoOptions::default());
        let mut controller = Controller::new(1, config, vec![ns], &io).unwrap();
        controller.pause();
        controller
    }

    /// Changes the state of a stopped controller, and loads it into another one.
    fn load(change: impl FnOnce(&mut MovedState)) -> Result<MovedState, RestoreError> {
        let mut moved = MovedState::decode(&stopped().save_stream()?)?;
        change(&mut moved);
        let mut controller = stopped();
        controller.load_stream(&moved.encode()?)?;
        MovedState::decode(&controller.save_stream()?)
    }

    #[test]
    fn log_page_that_host_cannot_be_reading_is_dropped() {
        let loaded = |marks: MarkedRanges| {
            let loaded = load(|moved| {
                let status = moved.control.logs.lba_status.as_mut().unwrap();
                status.reading = Some((7, marks));
            });
            loaded.unwrap().control.logs.lba_status.unwrap().reading
        };
        let possible = vec![(1, vec![(0, 8), (8, 1), (BLOCKS - 1, 1)])];
        assert_eq!(loaded(possible.clone()), Some((7, possible)));
        for forged in [
            vec![(1, vec![(0, u64::MAX)])],
            vec![(1, vec![(u64::MAX, 2)])],
            vec![(1, vec![(0, BLOCKS + 1)])],
            vec![(1, vec![(0, BLOCKS), (0, BLOCKS)])],
            vec![(1, (0..MAX_RANGES as u64 + 1).map(|_| (0, 0)).collect())],
            vec![(2, vec![(0, 1)])],
            vec![(1, vec![]); 2],
        ] {
            assert_eq!(loaded(forged.clone()), None, "{forged:?}");
        }
    }

    #[test]
    fn more_queues_or_marks_than_possible_are_refused() {
        let marked = |marks: MarkedRanges| {
            load(|moved| moved.control.logs.lba_status.as_mut().unwrap().marks = marks)
        };
        let ranges = |count: usize| vec![(1, vec![(0, 1); count])];
        marked(ranges(MAX_RANGES)).unwrap();
        let other = marked(vec![(2, vec![(0, 1)]); 99]).unwrap();
        assert_eq!(other.control.logs.lba_status.unwrap().marks, []);
        for many in [ranges(MAX_RANGES + 1), vec![(1, vec![]); 2]] {
            let error = marked(many).unwrap_err();
            assert!(matches!(error, RestoreError::Contradiction(_)), "{error}");
        }
        let queues = |count: usize| load(|moved| moved.queues = vec![MovedQueue::default(); count]);
        queues(5).unwrap();
        let error = queues(6).unwrap_err();
        assert!(matches!(error, RestoreError::Contradiction(_)), "{error}");
        queues(MAX_QUEUES).unwrap_err();
        // More of them are not even decoded.
        let error = queues(MAX_QUEUES + 1).unwrap_err();
        assert!(matches!(error, RestoreError::Form(_)), "{error}");
    }

    #[test]
    fn features_of_other_namespaces_are_dropped() {
        let loaded = load(|moved| {
            let features = &mut moved.control.features;
            features.error_recovery = (0..999).map(|nsid| (nsid, 3)).collect();
            features.notification_masks = (0..999).map(|nsid| (nsid, 5)).collect();
        });
        let features = loaded.unwrap().control.features;
        assert_eq!(features.error_recovery, [(1, 3)]);
        assert_eq!(features.notification_masks, [(1, 5)]);
    }

    #[test]
    fn newer_stream_is_refused_as_such() {
        let mut stream = state().encode().unwrap();
        stream[8] = VERSION as u8 + 1;
        let error = MovedState::decode(&stream).unwrap_err();
        assert!(
            matches!(error, RestoreError::TooNew { version: 2 }),
            "{error}"
        );
        let mut newer = state();
        newer.control.version = STATE_VERSION + 1;
        let error = MovedState::decode(&newer.encode().unwrap()).unwrap_err();
        assert!(matches!(error, RestoreError::TooNew { .. }), "{error}");
    }
}
