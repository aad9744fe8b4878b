//! Get Features and Set Features ("NVMe Base 2.1", 5.1.11 and 5.1.25).
//!
//! Values last until the next controller-level reset. No feature is saveable, and the saved value
//! reads as the default. The features of Flexible Data Placement are an exception: they are always
//! saved ([`placement`](super::placement)).
//!
//! *NSIDs* ("NVMe Base 2.1", 4.4). A feature of the controller is set with NSID 0 or FFFFFFFFh; a
//! valid NSID is refused as Feature Not Namespace Specific. Any NSID can read it. A feature of
//! namespaces (Error Recovery) is set for one namespace, or with FFFFFFFFh for all, and read for
//! one only. For reads, NSID 0 and FFFFFFFFh are Invalid Namespace or Format, as is any invalid
//! NSID, because each namespace has its own value; an inactive NSID is Invalid Field ("NVMe Base
//! 2.1", Figure 92). QEMU's controller and drives (for example an Optane P5800X) answer in the same
//! way. SPDK's target has one value for all namespaces and ignores the NSID, and Linux's target
//! lacks this feature. Hosts therefore have to handle either answer, and Linux's driver does not
//! use the feature. The capabilities of a feature (Select 011b) are equal for all namespaces, and
//! returned for any NSID.
//!
//! [`table`] lists the features, and describes how to add one.

mod table;
#[cfg(test)]
mod toy;

use super::{AdminOutcome, AdminResult, INVALID_FIELD, lba_status};
use crate::config::ControllerConfig;
use crate::control::Controller;
use crate::engine::commands::Offer;
use crate::engine::copy::CROSS_FORMATS;
use crate::engine::{Coalescing, EngineFeatures, Order};
use crate::survival::Since;
use crate::survival::state::FeatureValues;
use nvme::cmd::NSID_BROADCAST;
use nvme::cmd::admin::{FeatureCapabilities, FeatureSelect, GetFeaturesCdw10, SetFeaturesCdw10};
use nvme::feature::{Fid, HostBehavior, ReservationNotificationMask};
use nvme::{Command, Status};
use std::collections::BTreeMap;
use std::time::Duration;
use table::{Feature, Query};

/// Over-temperature threshold after power-on in kelvins, equal to WCTEMP of Identify Controller.
const DEFAULT_OVER: u16 = 343;
/// Arbitration Burst (AB) after power-on, as a power of two: 2^5 is 32 commands.
const DEFAULT_ARBITRATION: u32 = 5;
/// Timestamp Origin ("NVMe Base 2.1", 5.1.25.1.7): the host has set the timestamp. The other value,
/// 0, means that it counts from a controller-level reset.
const ORIGIN_SET: u8 = 1;

/// Current values of the features that Get Features and Set Features access.
pub(crate) struct Features {
    arbitration: u32,
    /// Over-temperature and under-temperature threshold of the composite temperature, in kelvins.
    pub thresholds: [u16; 2],
    /// Value of the Error Recovery feature (TLER, DULBE) of each namespace for which the host has
    /// set one, by NSID; otherwise 0.
    error_recovery: BTreeMap<u32, u32>,
    pub write_cache: bool,
    coalescing: u32,
    coalescing_disabled: u128,
    write_atomicity: u32,
    pub event_config: u32,
    timestamp: Timestamp,
    host_identifier: [u8; 16],
    host_behavior: HostBehavior,
    /// LBA Status Information Report Interval (LSIRI), in units of 100 ms.
    pub lsiri: u16,
    /// Value of the Reservation Notification Mask feature of each namespace for which the host has
    /// set one, by NSID; otherwise 0.
    notification_masks: BTreeMap<u32, u32>,
}

/// Timestamp feature, which counts milliseconds: from zero after a controller-level reset, or from
/// the value that the host has set.
struct Timestamp {
    /// Value of the timestamp in milliseconds when it was set.
    value: u64,
    set_at: Since,
    origin: u8,
}

impl Timestamp {
    fn new() -> Self {
        Timestamp {
            value: 0,
            set_at: Since::now(),
            origin: 0,
        }
    }

    fn to_bytes(&self) -> [u8; 8] {
        let elapsed = u64::try_from(self.set_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.encode(self.value.wrapping_add(elapsed))
    }

    /// Returns the timestamp at a wall clock time in milliseconds; 0 for times before the timestamp
    /// was set.
    fn at(&self, wall: u64) -> [u8; 8] {
        let since = self.value.saturating_add(wall);
        self.encode(since.saturating_sub(self.set_at.wall()))
    }

    fn encode(&self, milliseconds: u64) -> [u8; 8] {
        let mut bytes = milliseconds.to_le_bytes();
        bytes[6] = self.origin << 1;
        bytes[7] = 0;
        bytes
    }
}

impl Features {
    /// Returns the Timestamp feature as Get Features reports it.
    pub(super) fn timestamp_bytes(&self) -> [u8; 8] {
        self.timestamp.to_bytes()
    }

    /// Converts a wall clock time in milliseconds to a value of the Timestamp feature, as it counts
    /// now.
    pub(super) fn timestamp_at(&self, wall: u64) -> [u8; 8] {
        self.timestamp.at(wall)
    }

    pub fn new(config: &ControllerConfig) -> Self {
        Features {
            arbitration: DEFAULT_ARBITRATION,
            thresholds: [DEFAULT_OVER, 0],
            error_recovery: BTreeMap::new(),
            write_cache: config.write_cache,
            coalescing: 0,
            coalescing_disabled: 0,
            write_atomicity: 0,
            event_config: 0,
            timestamp: Timestamp::new(),
            host_identifier: config
                .subsystem
                .as_ref()
                .map_or([0; 16], |s| *s.host.bytes()),
            host_behavior: HostBehavior::default(),
            lsiri: lba_status::attributes(0).lsiri(),
            notification_masks: BTreeMap::new(),
        }
    }

    /// Returns the feature values for the next process. `keep_alive` is the Keep Alive Timeout in
    /// milliseconds.
    pub fn save(&self, keep_alive: u32) -> FeatureValues {
        let Features {
            arbitration,
            thresholds: [over, under],
            error_recovery,
            write_cache,
            coalescing,
            coalescing_disabled,
            write_atomicity,
            event_config,
            timestamp:
                Timestamp {
                    value,
                    set_at,
                    origin,
                },
            host_identifier,
            host_behavior,
            lsiri,
            notification_masks,
        } = self;
        FeatureValues {
            arbitration: *arbitration,
            thresholds: (*over, *under),
            error_recovery: error_recovery.iter().map(|(n, v)| (*n, *v)).collect(),
            write_cache: *write_cache,
            coalescing: *coalescing,
            coalescing_disabled: (
                *coalescing_disabled as u64,
                (*coalescing_disabled >> 64) as u64,
            ),
            write_atomicity: *write_atomicity,
            event_config: *event_config,
            timestamp: (*value, set_at.wall(), *origin),
            host_identifier: *host_identifier,
            keep_alive,
            notification_masks: notification_masks.iter().map(|(n, m)| (*n, *m)).collect(),
            host_behavior: (
                host_behavior.acre,
                host_behavior.etdas,
                host_behavior.lbafee,
                host_behavior.hdisns,
                host_behavior.cdfe.get(),
            ),
            lsiri: *lsiri,
        }
    }

    /// Restores the values saved by [`Features::save`].
    pub fn restore(saved: &FeatureValues) -> Self {
        let (low, high) = saved.coalescing_disabled;
        let (over, under) = saved.thresholds;
        let (value, set_at, origin) = saved.timestamp;
        let (acre, etdas, lbafee, hdisns, cdfe) = saved.host_behavior;
        Features {
            arbitration: saved.arbitration,
            thresholds: [over, under],
            error_recovery: saved.error_recovery.iter().copied().collect(),
            write_cache: saved.write_cache,
            coalescing: saved.coalescing & 0xffff,
            coalescing_disabled: u128::from(high) << 64 | u128::from(low),
            write_atomicity: saved.write_atomicity,
            event_config: saved.event_config,
            timestamp: Timestamp {
                value,
                set_at: Since::from_wall(set_at),
                origin: origin & 7,
            },
            host_identifier: saved.host_identifier,
            host_behavior: HostBehavior {
                acre,
                etdas,
                lbafee,
                hdisns,
                cdfe: cdfe.into(),
                ..HostBehavior::default()
            },
            lsiri: saved.lsiri,
            notification_masks: saved.notification_masks.iter().copied().collect(),
        }
    }

    /// Returns the mask of reservation notifications of a namespace. Masked ones create no log
    /// page.
    pub fn notification_mask(&self, nsid: u32) -> ReservationNotificationMask {
        let mask = self.notification_masks.get(&nsid);
        ReservationNotificationMask::from_bits(mask.copied().unwrap_or(0))
    }

    /// Returns the values that engines use.
    fn for_engines(&self) -> EngineFeatures {
        EngineFeatures {
            write_cache: self.write_cache,
            coalescing: Coalescing {
                threshold: (self.coalescing & 0xff) + 1,
                time: Duration::from_micros(u64::from(self.coalescing >> 8 & 0xff) * 100),
                disabled: self.coalescing_disabled,
            },
            copy_formats: self.host_behavior.cdfe.get(),
            lbafee: self.lbafee(),
        }
    }

    /// Returns whether the host has enabled extended formats of protection information (LBA Format
    /// Extension Enable).
    pub fn lbafee(&self) -> bool {
        self.host_behavior.lbafee == 1
    }
}

/// Returns the accepted value of Host Behavior Support without reserved fields; `None` when the
/// host enables an unsupported behavior.
///
/// Behaviors that only concern the host (Command Retry Delay, area 4 of telemetry, dispersed
/// namespaces) are accepted. Extended formats of protection information, if the controller has them
/// (`elbas`), and further descriptor formats of Copy are enabled.
fn accepted(wanted: &HostBehavior, elbas: bool) -> Option<HostBehavior> {
    let HostBehavior {
        acre,
        etdas,
        lbafee,
        hdisns,
        cdfe,
        ..
    } = *wanted;
    let flags = acre <= 1 && etdas <= 1 && hdisns <= 1 && lbafee <= u8::from(elbas);
    (flags && cdfe.get() & !CROSS_FORMATS == 0).then(|| HostBehavior {
        acre,
        etdas,
        lbafee,
        hdisns,
        cdfe,
        ..HostBehavior::default()
    })
}

/// Returns the supported features with their capabilities, for the Feature Identifiers Supported
/// and Effects log page.
pub(super) fn supported(offer: Offer) -> impl Iterator<Item = (Fid, FeatureCapabilities)> {
    table::offered(offer)
}

/// Returns whether a controller with the properties `offer` supports the feature with this
/// identifier.
pub(super) fn is_supported(fid: Fid, offer: Offer) -> bool {
    table::find(fid, offer).is_some()
}

impl Controller {
    /// Returns the table row of a feature that the controller has.
    fn feature(&self, fid: Fid) -> Result<&'static Feature, Status> {
        let row = table::find(fid, self.engine.offer());
        row.filter(|row| (row.present)(self)).ok_or(INVALID_FIELD)
    }

    pub(super) fn get_features(&mut self, command: &Command) -> AdminResult {
        let cdw10 = GetFeaturesCdw10::from_bits(command.cdw10.get());
        let feature = self.feature(cdw10.fid())?;
        if cdw10.sel() == FeatureSelect::SUPPORTED_CAPABILITIES {
            return Ok(AdminOutcome::Done(feature.capabilities.into_bits()));
        }
        if feature.capabilities.namespace_specific() {
            self.check_nsid(command.nsid.get(), false)?;
        }
        let defaults;
        let (features, keep_alive) = match cdw10.sel() {
            FeatureSelect::CURRENT => (&self.admin.features, self.keep_alive()),
            FeatureSelect::DEFAULT | FeatureSelect::SAVED => {
                defaults = Features::new(&self.config);
                (&defaults, 0)
            }
            _ => return Err(INVALID_FIELD),
        };
        let query = Query {
            command,
            features,
            keep_alive,
        };
        (feature.get)(self, &query).map(AdminOutcome::Done)
    }

    /// Returns whether any namespace has a volatile write cache, or one that is attached later may
    /// have one. Hosts read this value only once.
    pub(super) fn has_write_cache(&self) -> bool {
        let room = self.config.max_namespaces as usize > self.active().count();
        room || self.active().any(|ns| ns.volatile_cache)
    }

    fn check_nsid(&self, nsid: u32, broadcast: bool) -> Result<(), Status> {
        if !broadcast || nsid != NSID_BROADCAST {
            self.engine.namespaces.index_of(nsid)?;
        }
        // A feature of a namespace is inaccessible while the ANA state makes the namespace so.
        match self.engine.namespaces.unreached(nsid) {
            Some(status) => Err(status),
            None => Ok(()),
        }
    }

    pub(super) fn set_features(&mut self, command: &Command) -> AdminResult {
        let cdw10 = SetFeaturesCdw10::from_bits(command.cdw10.get());
        let nsid = command.nsid.get();
        let feature = self.feature(cdw10.fid())?;
        if cdw10.sv() && !feature.capabilities.saveable() {
            return Err(Status::FEATURE_NOT_SAVEABLE.with_dnr(true));
        }
        if feature.capabilities.namespace_specific() {
            self.check_nsid(nsid, true)?;
        } else if nsid != 0 && nsid != NSID_BROADCAST {
            return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC.with_dnr(true));
        }
        let outcome = (feature.set)(self, command)?;
        if let AdminOutcome::Done(_) = outcome {
            self.apply_features();
        }
        Ok(outcome)
    }

    /// Sends all engines the feature values that they use.
    pub(crate) fn apply_features(&mut self) {
        let features = self.admin.features.for_engines();
        self.order_all(|| Order::Features(features));
    }

    /// Returns this NSID if it is active, or for the broadcast NSID those of all active namespaces.
    fn namespaces_under(&self, nsid: u32) -> Vec<u32> {
        let all = self.active().map(|ns| ns.config.nsid);
        all.filter(|&n| nsid == NSID_BROADCAST || n == nsid)
            .collect()
    }

    /// Completes the Set Features commands that wait for the flush of a disabled write cache.
    pub(crate) fn cache_flushed(&mut self, failed: Option<Status>) {
        for cid in std::mem::take(&mut self.admin.cache_flushes) {
            if let Some(status) = failed {
                self.failed(0, cid, status, 0, 0);
            }
            self.finish_admin(cid, failed.unwrap_or(Status::SUCCESS), 0);
        }
    }
}
