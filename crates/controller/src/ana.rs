//! Asymmetric Namespace Access ("NVMe Base 2.1", 8.1.1): the controllers by which a host reaches
//! the namespaces of a group, and the state of each path.
//!
//! A controller of a subsystem has a state for each group of its namespaces, which is changed at
//! run time ([`Subsystem::set_ana_state`]). A controller that hosts reach over a network has the
//! state of the port that they connected to ([`AnaGroup`](crate::AnaGroup)). Both report it in
//! the same ways: Identify, the ANA log page, the notice.
//!
//! *Effect of a change.* The engine learns of it between two commands. Each later command for a
//! namespace of an inaccessible group ends with the status of that state, without effect, and the
//! host sends it by another controller. A command that was fetched before ends normally.
//! Therefore no command is executed twice, and none is lost. The caller that changes the state
//! can wait for the end of the earlier commands ([`AnaChange::wait`]).
//!
//! An accessible namespace has no cost: an inaccessible one is not among those that the fast path
//! finds (`engine::gate`).
//!
//! [`Subsystem::set_ana_state`]: crate::Subsystem::set_ana_state

use nvme::Status;
use nvme::identify::{Anacap, Cmic, IdentifyController};
use nvme::log::{AnaGroup as GroupDescriptor, AnaGroupState, AnaHeader, AnaState};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use zerocopy::IntoBytes;

/// Default ANA group of a namespace; groups are numbered from here on.
pub(crate) const FIRST_GROUP: u32 = 1;
/// Largest ANAGRPID of a subsystem: the log page of all groups fits into one command of any host.
pub const MAX_ANA_GROUP: u32 = 32;
/// ANATT: maximum duration of a change, in seconds. Hosts give up a controller that reports the
/// change state for longer.
const ANATT: u8 = 10;
/// Return Groups Only, in the Log Specific Parameter of the ANA log page.
pub(crate) const RGO: u8 = 1;

/// Returns the status of commands for a namespace of a group in this state; `None` where they are
/// executed. Another path may execute them, so Do Not Retry is not set.
pub(crate) fn refusal(state: AnaState) -> Option<Status> {
    match state {
        AnaState::OPTIMIZED | AnaState::NON_OPTIMIZED => None,
        AnaState::INACCESSIBLE => Some(Status::ANA_INACCESSIBLE),
        AnaState::PERSISTENT_LOSS => Some(Status::ANA_PERSISTENT_LOSS),
        _ => Some(Status::ANA_TRANSITION),
    }
}

/// Returns whether the status is one of those of [`refusal`].
pub(crate) fn is_refusal(status: Status) -> bool {
    [
        Status::ANA_INACCESSIBLE,
        Status::ANA_PERSISTENT_LOSS,
        Status::ANA_TRANSITION,
    ]
    .iter()
    .any(|refusal| status.is(*refusal))
}

/// Sets the ANA fields of Identify Controller, for groups up to this one.
pub(crate) fn describe(page: &mut IdentifyController, last_group: u32) {
    page.cmic = Cmic::new()
        .with_mports(true)
        .with_mctrs(true)
        .with_anars(true);
    page.oaes = page.oaes.with_anacn(true);
    page.anatt = ANATT;
    page.anacap = Anacap::new()
        .with_ros(true)
        .with_rnos(true)
        .with_ris(true)
        .with_rpls(true)
        .with_rcs(true);
    page.anagrpmax = last_group.into();
    page.nanagrpid = last_group.into();
}

/// A group's entry in the log page.
pub(crate) struct Told {
    pub group: u32,
    pub state: AnaState,
    /// Number of changes of the state, from 1 on.
    pub changes: u64,
    /// NSIDs in order; empty where the host asked for groups only.
    pub nsids: Vec<u32>,
}

/// Returns the ANA log page; `changes` counts changes of its content.
pub(crate) fn log_page(changes: u64, groups: &[Told]) -> Vec<u8> {
    let header = AnaHeader {
        chgcnt: changes.into(),
        nagd: (groups.len() as u16).into(),
        ..AnaHeader::default()
    };
    let mut page = header.as_bytes().to_vec();
    for told in groups {
        let group = GroupDescriptor {
            agid: told.group.into(),
            nnsid: (told.nsids.len() as u32).into(),
            chgcnt: told.changes.into(),
            state: AnaGroupState::new().with_anas(told.state),
            ..GroupDescriptor::default()
        };
        page.extend_from_slice(group.as_bytes());
        page.extend(told.nsids.iter().flat_map(|nsid| nsid.to_le_bytes()));
    }
    page
}

/// A pending change of an ANA state.
#[derive(Debug)]
pub struct AnaChange(Receiver<()>);

impl AnaChange {
    /// Creates the sender that the controller drops at the end, and the receiver that waits for
    /// it.
    pub(crate) fn new() -> (Sender<()>, AnaChange) {
        let (done, receiver) = channel();
        (done, AnaChange(receiver))
    }

    /// Waits until the controller refuses commands according to the new state, and no earlier
    /// command is in flight any more. Also returns when there is no controller, or it is removed.
    /// Returns `false` after a timeout; the state has changed all the same.
    pub fn wait(&self, limit: Duration) -> bool {
        self.0.recv_timeout(limit) != Err(RecvTimeoutError::Timeout)
    }
}
