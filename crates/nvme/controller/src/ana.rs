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

/// Number of the first ANA group, which is the default group of a namespace.
pub(crate) const FIRST_GROUP: u32 = 1;
/// Largest ANA group ID (ANAGRPID) of a subsystem. With this limit, one Get Log Page command of any
/// host can read the log page of all groups.
pub const MAX_ANA_GROUP: u32 = 32;
/// ANA Transition Time (ANATT): maximum duration of a state change, in seconds. A host gives up a
/// controller that reports the Change state for longer.
const ANATT: u8 = 10;
/// Return Groups Only: bit of the Log Specific Parameter field with which a host requests the ANA
/// log page without NSIDs.
pub(crate) const RGO: u8 = 1;

/// Returns the status that ends commands for namespaces of a group in this state; `None` when the
/// commands are executed. Do Not Retry is not set, because another path may execute them.
pub(crate) fn refusal(state: AnaState) -> Option<Status> {
    match state {
        AnaState::OPTIMIZED | AnaState::NON_OPTIMIZED => None,
        AnaState::INACCESSIBLE => Some(Status::ANA_INACCESSIBLE),
        AnaState::PERSISTENT_LOSS => Some(Status::ANA_PERSISTENT_LOSS),
        _ => Some(Status::ANA_TRANSITION),
    }
}

/// Returns whether a command ended with a path-related status of an ANA state, see [`refusal`].
pub(crate) fn is_refusal(status: Status) -> bool {
    [
        Status::ANA_INACCESSIBLE,
        Status::ANA_PERSISTENT_LOSS,
        Status::ANA_TRANSITION,
    ]
    .iter()
    .any(|refusal| status.is(*refusal))
}

/// Sets the ANA fields of Identify Controller; `last_group` is the largest group ID.
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

/// Descriptor of one group in the Asymmetric Namespace Access (ANA) log page.
pub(crate) struct AnaGroupEntry {
    pub group: u32,
    pub state: AnaState,
    /// Number of changes of the group's ANA state so far, starting at 1.
    pub changes: u64,
    /// NSIDs of the group's namespaces in ascending order; empty when the host requested groups
    /// only.
    pub nsids: Vec<u32>,
}

/// Builds the ANA log page of these groups; `changes` is the number of changes of its content.
pub(crate) fn log_page(changes: u64, groups: &[AnaGroupEntry]) -> Vec<u8> {
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

/// A pending change of an ANA state, returned by
/// [`Subsystem::set_ana_state`](crate::Subsystem::set_ana_state).
#[derive(Debug)]
pub struct AnaChange(Receiver<()>);

impl AnaChange {
    /// Creates a pending change and the sender that ends it: the controller drops the sender when
    /// the change has taken full effect.
    pub(crate) fn new() -> (Sender<()>, AnaChange) {
        let (done, receiver) = channel();
        (done, AnaChange(receiver))
    }

    /// Waits until the controller refuses or accepts commands according to the new state, and no
    /// earlier command is outstanding. Also returns when the controller does not exist or is
    /// removed. Returns `false` after a timeout; the state has changed nevertheless.
    pub fn wait(&self, limit: Duration) -> bool {
        self.0.recv_timeout(limit) != Err(RecvTimeoutError::Timeout)
    }
}
