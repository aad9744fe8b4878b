//! Asymmetric Namespace Access ("NVMe Base 2.1", 8.1.1): by which controller a host reaches the
//! namespaces of a group, and how well.
//!
//! A controller of a subsystem has a state for each group of its namespaces, which is changed while
//! it runs ([`Subsystem::set_ana_state`]); one that hosts reach over a network has one for the port
//! that they came to ([`AnaGroup`](crate::AnaGroup)). Both say so in the same words: Identify, the
//! ANA log page, the notice.
//!
//! *What a change does.* The engine learns of it between two commands. Each command that it fetches
//! later, and that is for a namespace of a group which cannot be reached, ends with the status of
//! that state, with nothing done; the host sends it by another controller. One that was fetched
//! before ends as it would have ended: so no command is done twice, and none is lost. The
//! caller that changes the state can wait until nothing of those is left ([`AnaChange::wait`]).
//!
//! A namespace that can be reached costs nothing: one that cannot is not among those that the short
//! way finds (`engine::gate`).
//!
//! [`Subsystem::set_ana_state`]: crate::Subsystem::set_ana_state

use nvme::Status;
use nvme::identify::{Anacap, Cmic, IdentifyController};
use nvme::log::{AnaGroup as GroupDescriptor, AnaGroupState, AnaHeader, AnaState};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use zerocopy::IntoBytes;

/// The group of namespaces of which nothing else is said, from which on groups are numbered.
pub(crate) const FIRST_GROUP: u32 = 1;
/// The largest ANAGRPID, as a subsystem may have it: the log page of them all has room in one
/// command of any host.
pub const MAX_ANA_GROUP: u32 = 32;
/// ANATT: how long a change takes at most, in seconds. Hosts give up a controller that says for
/// longer that its state is changing.
const ANATT: u8 = 10;
/// Return Groups Only, of the ANA log page.
pub(crate) const RGO: u8 = 1;

/// The status of commands for a namespace whose group is in this state; `None` where they are done.
/// Another path may do them, so a host is not told to give up.
pub(crate) fn refusal(state: AnaState) -> Option<Status> {
    match state {
        AnaState::OPTIMIZED | AnaState::NON_OPTIMIZED => None,
        AnaState::INACCESSIBLE => Some(Status::ANA_INACCESSIBLE),
        AnaState::PERSISTENT_LOSS => Some(Status::ANA_PERSISTENT_LOSS),
        _ => Some(Status::ANA_TRANSITION),
    }
}

/// The status is one of those.
pub(crate) fn is_refusal(status: Status) -> bool {
    [
        Status::ANA_INACCESSIBLE,
        Status::ANA_PERSISTENT_LOSS,
        Status::ANA_TRANSITION,
    ]
    .iter()
    .any(|refusal| status.is(*refusal))
}

/// Fills in what Identify Controller says of groups up to this one.
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

/// A group, as the log page has it.
pub(crate) struct Told {
    pub group: u32,
    pub state: AnaState,
    /// Of the state, from 1 on.
    pub changes: u64,
    /// In order; none where the host asked for groups only.
    pub nsids: Vec<u32>,
}

/// The ANA log page, after so many changes of anything in it.
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

/// A change of a state, on its way to the controller.
#[derive(Debug)]
pub struct AnaChange(Receiver<()>);

impl AnaChange {
    /// Where the controller says that it is done, and where that is waited for.
    pub(crate) fn new() -> (Sender<()>, AnaChange) {
        let (done, receiver) = channel();
        (done, AnaChange(receiver))
    }

    /// Waits until the controller refuses the commands that the new state refuses, and no command
    /// that came before is in flight any more; so also where there is no controller, or it goes.
    /// `false`: that took too long. The state has changed for all that.
    pub fn wait(&self, limit: Duration) -> bool {
        self.0.recv_timeout(limit) != Err(RecvTimeoutError::Timeout)
    }
}
