//! Types of requests and answers. Numbers are in the units of their names, times in those of their
//! suffixes. Within a version of the API, fields may be added but never change their meaning: a
//! client ignores fields that it does not know.

mod ana;
mod device;
mod disk;
mod event;
mod export;
mod limits;
mod on_error;
mod path;
mod plan;
mod stats;

pub use ana::{AnaChange, AnaState, AnaStatus};
pub use device::{DeviceState, DeviceStatus};
pub use disk::{
    Disk, DiskClient, DiskKind, DiskState, Namespace, NewDisk, OfGuest, Resize, Trouble,
    TroubleState,
};
pub use event::{Event, EventKind};
pub use export::{Export, NewExport};
pub use limits::{LimitChange, VolumeLimits};
pub use on_error::{ErrorAction, ErrorChange, VolumeErrors};
pub use path::{PathChange, PathChoice, PathState};
pub use plan::{Plan, Refusal};
pub use stats::{
    ControllerCounters, Cycles, LaneCounters, PathCounters, QueueCounters, RingCounters,
    SocketCounters, Stats, UblkCounters, UblkQueueCounters, VhostBlkCounters,
    VhostBlkQueueCounters, WorkerCounters,
};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of an answer that refuses a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// Reason, as text.
    pub error: String,
}
