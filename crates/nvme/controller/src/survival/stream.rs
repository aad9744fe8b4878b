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
use super::state::{ControlState, STATE_OLDEST_READ, STATE_VERSION};
use minicbor::{Decode, Encode};

/// Version of the stream that this crate writes.
const VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"vnvmeMIG";
const HEADER: usize = 20;
/// Maximum size of a stream in bytes.
pub const MAX_STREAM: usize = 8 << 20;

/// Payload of a stream.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct MovedState {
    #[n(0)]
    pub control: ControlState,
    /// All queues of the controller.
    #[n(1)]
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

fn damaged(why: &str) -> RestoreError {
    RestoreError::Form(why.into())
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
