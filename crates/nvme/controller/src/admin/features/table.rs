//! Table of the features that Get Features and Set Features access.
//!
//! A row determines both commands, the capabilities of the feature, and its entry in the Feature
//! Identifiers Supported and Effects log page.
//!
//! # To add a feature
//!
//! 1. Its value is a field of [`Features`], with a default in [`Features::new`], and in
//!    [`Features::save`] and [`Features::restore`] for the next process.
//! 2. Add a row to [`FEATURES`] with the functions that get and set it. Module `toy`, which only
//!    tests contain, is an example.
//!
//! `nvme::feature::Fid` already has the identifier, unless it is vendor specific.
//! `tests/it/supported.rs` compares reported and actual support for every identifier.

use super::{Features, ORIGIN_SET, Timestamp, accepted};
use crate::admin::{AdminOutcome, AdminResult, INVALID_FIELD, lba_status};
use crate::control::Controller;
use crate::engine::commands::Offer;
use crate::prefix;
use crate::survival::Since;
use nvme::cmd::NSID_BROADCAST;
use nvme::cmd::admin::FeatureCapabilities;
use nvme::feature::{Fid, HostBehavior, ReservationPersistence};
use nvme::{Command, Status};
use zerocopy::{FromBytes, IntoBytes};

/// Result of a Set Features command that returns nothing in dword 0.
pub(super) const DONE: AdminResult = Ok(AdminOutcome::Done(0));

/// Table of all features, searched by identifier.
static FEATURES: &[Feature] = &[
    Feature::new(
        Fid::ARBITRATION,
        |_, get| Ok(get.features.arbitration),
        |c, command| {
            c.admin.features.arbitration = command.cdw11.get() & 0xffff_ff07;
            DONE
        },
    ),
    // Power state 0 is the only one.
    Feature::new(Fid::POWER_MANAGEMENT, always_zero, |_, command| {
        match command.cdw11.get() & 0x1f {
            0 => DONE,
            _ => Err(INVALID_FIELD),
        }
    }),
    Feature::new(Fid::TEMPERATURE_THRESHOLD, threshold, set_threshold),
    Feature::new(Fid::ERROR_RECOVERY, error_recovery, set_error_recovery).of_namespaces(),
    Feature::new(
        Fid::VOLATILE_WRITE_CACHE,
        |_, get| Ok(get.features.write_cache.into()),
        set_write_cache,
    )
    .present_if(Controller::has_write_cache),
    Feature::new(
        Fid::NUMBER_OF_QUEUES,
        |c, _| Ok(queue_counts(c)),
        set_queue_counts,
    ),
    Feature::new(
        Fid::INTERRUPT_COALESCING,
        |_, get| Ok(get.features.coalescing),
        |c, command| {
            c.admin.features.coalescing = command.cdw11.get() & 0xffff;
            DONE
        },
    ),
    Feature::new(
        Fid::INTERRUPT_VECTOR_CONFIG,
        vector_config,
        set_vector_config,
    ),
    Feature::new(
        Fid::WRITE_ATOMICITY,
        |_, get| Ok(get.features.write_atomicity),
        |c, command| {
            c.admin.features.write_atomicity = command.cdw11.get() & 1;
            DONE
        },
    ),
    Feature::new(
        Fid::ASYNC_EVENT_CONFIG,
        |_, get| Ok(get.features.event_config),
        |c, command| {
            c.admin.features.event_config = command.cdw11.get();
            c.admin.rearm();
            c.check_temperature();
            DONE
        },
    ),
    Feature::new(
        Fid::TIMESTAMP,
        |c, get| get.data(c, &get.features.timestamp_bytes()),
        set_timestamp,
    ),
    Feature::new(
        Fid::KEEP_ALIVE_TIMER,
        |_, get| Ok(get.keep_alive),
        |c, command| {
            c.set_keep_alive(command.cdw11.get());
            DONE
        },
    ),
    // Command set combination 0 is the only one.
    Feature::new(
        Fid::IO_COMMAND_SET_PROFILE,
        always_zero,
        |_, command| match command.cdw11.get() & 0x1ff {
            0 => DONE,
            _ => Err(Status::IO_COMMAND_SET_COMBINATION_REJECTED.with_dnr(true)),
        },
    ),
    Feature::new(
        Fid::HOST_BEHAVIOR_SUPPORT,
        |c, get| get.data(c, get.features.host_behavior.as_bytes()),
        set_host_behavior,
    ),
    Feature::new(
        Fid::LBA_STATUS_INFORMATION_ATTRIBUTES,
        |_, get| Ok(lba_status::attributes(get.features.lsiri).into_bits()),
        set_lba_status_attributes,
    )
    .offered_if(|offer| offer.marks),
    Feature::new(Fid::HOST_IDENTIFIER, host_identifier, set_host_identifier)
        .offered_if(|offer| !offer.shared),
    // The host identifier is part of a subsystem's configuration, so the host cannot change it.
    Feature::new(Fid::HOST_IDENTIFIER, host_identifier, keep_host_identifier)
        .unchangeable()
        .offered_if(|offer| offer.shared),
    Feature::new(
        Fid::RESERVATION_NOTIFICATION_MASK,
        |_, get| {
            let mask = get.features.notification_mask(get.nsid());
            Ok(mask.into_bits())
        },
        set_notification_mask,
    )
    .of_namespaces()
    .offered_if(|offer| offer.shared),
    Feature::new(
        Fid::RESERVATION_PERSISTENCE,
        |c, get| {
            let persistence = c.persistence(get.nsid());
            Ok(persistence.is_some_and(|(on, _)| on).into())
        },
        set_persistence,
    )
    .of_namespaces()
    .offered_if(|offer| offer.shared),
    Feature::new(
        Fid::FLEXIBLE_DATA_PLACEMENT,
        |c, get| c.fdp_mode(get.command),
        |c, command| c.set_fdp_mode(command).and(DONE),
    )
    .unchangeable()
    .saveable()
    .offered_if(|offer| offer.placed),
    Feature::new(
        Fid::FDP_EVENTS,
        |c, get| c.fdp_event_types(get.command),
        |c, command| c.set_fdp_event_types(command).and(DONE),
    )
    .of_namespaces()
    .saveable()
    .offered_if(|offer| offer.placed),
    #[cfg(test)]
    super::toy::FEATURE,
];

/// Get Features command, with the set of values that it selects (current or default).
pub(super) struct Query<'a> {
    pub command: &'a Command,
    pub features: &'a Features,
    /// Keep Alive Timeout of that set in milliseconds.
    pub keep_alive: u32,
}

impl Query<'_> {
    fn cdw11(&self) -> u32 {
        self.command.cdw11.get()
    }

    fn nsid(&self) -> u32 {
        self.command.nsid.get()
    }

    /// Writes a value to the host's buffer. Dword 0 of the completion is then 0.
    fn data(&self, controller: &Controller, value: &[u8]) -> Result<u32, Status> {
        controller.write_host(self.command, value)?;
        Ok(0)
    }
}

/// Function that returns the value of a feature (dword 0 of the completion).
pub(super) type Get = fn(&Controller, &Query<'_>) -> Result<u32, Status>;

/// Function that sets a feature to the value in a Set Features command. If it is done, all engines
/// receive the changed values.
pub(super) type Set = fn(&mut Controller, &Command) -> AdminResult;

/// Table row of a feature.
pub(super) struct Feature {
    fid: Fid,
    pub get: Get,
    pub set: Set,
    pub capabilities: FeatureCapabilities,
    offered: fn(Offer) -> bool,
    /// Whether the controller has the feature at present, although it is offered.
    pub present: fn(&Controller) -> bool,
}

impl Feature {
    /// Creates the row of a feature that every controller has, with one value for the controller,
    /// which the host may change, but not save.
    pub(super) const fn new(fid: Fid, get: Get, set: Set) -> Self {
        Feature {
            fid,
            get,
            set,
            capabilities: FeatureCapabilities::new().with_changeable(true),
            offered: |_| true,
            present: |_| true,
        }
    }

    /// Gives the feature a value for each namespace.
    pub(super) const fn of_namespaces(self) -> Self {
        let capabilities = self.capabilities.with_namespace_specific(true);
        Feature {
            capabilities,
            ..self
        }
    }

    /// Marks the feature as saved across controller-level resets.
    const fn saveable(self) -> Self {
        let capabilities = self.capabilities.with_saveable(true);
        Feature {
            capabilities,
            ..self
        }
    }

    /// Marks the feature as one that the host cannot change.
    const fn unchangeable(self) -> Self {
        let capabilities = self.capabilities.with_changeable(false);
        Feature {
            capabilities,
            ..self
        }
    }

    /// Restricts the feature to controllers with certain properties.
    pub(super) const fn offered_if(self, offered: fn(Offer) -> bool) -> Self {
        Feature { offered, ..self }
    }

    /// Makes both commands fail while `present` returns `false`.
    const fn present_if(self, present: fn(&Controller) -> bool) -> Self {
        Feature { present, ..self }
    }
}

/// Returns the row of a feature; `None` when a controller with these properties does not support
/// it.
pub(super) fn find(fid: Fid, offer: Offer) -> Option<&'static Feature> {
    let mut rows = FEATURES.iter();
    rows.find(|row| row.fid == fid && (row.offered)(offer))
}

/// Returns the supported features with their capabilities, in the order of their identifiers.
pub(super) fn offered(offer: Offer) -> impl Iterator<Item = (Fid, FeatureCapabilities)> {
    let rows = FEATURES.iter().filter(move |row| (row.offered)(offer));
    rows.map(|row| (row.fid, row.capabilities))
}

fn always_zero(_: &Controller, _: &Query<'_>) -> Result<u32, Status> {
    Ok(0)
}

/// Returns the threshold and sensor fields of dword 11 of Temperature Threshold: value, sensor,
/// and index of the threshold.
fn threshold_fields(cdw11: u32) -> (u16, u32, usize) {
    (cdw11 as u16, cdw11 >> 16 & 0xf, (cdw11 >> 20 & 3) as usize)
}

fn threshold(_: &Controller, get: &Query<'_>) -> Result<u32, Status> {
    let (_, sensor, which) = threshold_fields(get.cdw11());
    // The composite temperature is the only sensor.
    match get.features.thresholds.get(which) {
        Some(threshold) if sensor == 0 => Ok(u32::from(*threshold)),
        _ => Err(INVALID_FIELD),
    }
}

fn set_threshold(c: &mut Controller, command: &Command) -> AdminResult {
    let (kelvins, sensor, which) = threshold_fields(command.cdw11.get());
    let threshold = c.admin.features.thresholds.get_mut(which);
    let threshold = threshold.ok_or(INVALID_FIELD)?;
    // Sensor 0 is the composite temperature and 1111b selects all sensors. No others exist.
    if !matches!(sensor, 0 | 0xf) {
        return Err(INVALID_FIELD);
    }
    *threshold = kelvins;
    c.check_temperature();
    DONE
}

fn error_recovery(_: &Controller, get: &Query<'_>) -> Result<u32, Status> {
    let value = get.features.error_recovery.get(&get.nsid());
    Ok(value.copied().unwrap_or(0))
}

fn set_error_recovery(c: &mut Controller, command: &Command) -> AdminResult {
    let cdw11 = command.cdw11.get();
    // Deallocated or Unwritten Logical Block errors are not supported (NSFEAT).
    if cdw11 & 1 << 16 != 0 {
        return Err(INVALID_FIELD);
    }
    let chosen = c.namespaces_under(command.nsid.get());
    let values = &mut c.admin.features.error_recovery;
    values.extend(chosen.into_iter().map(|n| (n, cdw11 & 0xffff)));
    DONE
}

fn set_write_cache(c: &mut Controller, command: &Command) -> AdminResult {
    let on = command.cdw11.get() & 1 != 0;
    if !std::mem::replace(&mut c.admin.features.write_cache, on) || on {
        return DONE;
    }
    // The host does not flush from now on, so its earlier writes must not be lost. New writes are
    // durable by themselves; the outstanding ones complete before the flush begins.
    c.apply_features();
    c.admin.cache_flushes.push(command.cid.get());
    c.flush_everywhere();
    Ok(AdminOutcome::Later)
}

fn queue_counts(c: &Controller) -> u32 {
    let count_z = u32::from(c.config.io_queues - 1);
    count_z << 16 | count_z
}

fn set_queue_counts(c: &mut Controller, command: &Command) -> AdminResult {
    let cdw11 = command.cdw11.get();
    if c.engine.queues.any_io_queue() || c.migration.any_queue() {
        return Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr(true));
    }
    if cdw11 & 0xffff == 0xffff || cdw11 >> 16 == 0xffff {
        return Err(INVALID_FIELD);
    }
    Ok(AdminOutcome::Done(queue_counts(c)))
}

/// Returns the interrupt vector that dword 11 names.
fn vector(c: &Controller, cdw11: u32) -> Result<u32, Status> {
    let vector = cdw11 & 0xffff;
    let exists = vector < u32::from(c.engine.irqs.vectors());
    exists.then_some(vector).ok_or(INVALID_FIELD)
}

fn vector_config(c: &Controller, get: &Query<'_>) -> Result<u32, Status> {
    let vector = vector(c, get.cdw11())?;
    // The vector of the admin queue is exempt from coalescing.
    let disabled = vector == 0 || get.features.coalescing_disabled >> vector & 1 != 0;
    Ok(vector | u32::from(disabled) << 16)
}

fn set_vector_config(c: &mut Controller, command: &Command) -> AdminResult {
    let cdw11 = command.cdw11.get();
    let bit = 1u128 << vector(c, cdw11)?;
    let disabled = &mut c.admin.features.coalescing_disabled;
    *disabled = if cdw11 & 1 << 16 != 0 {
        *disabled | bit
    } else {
        *disabled & !bit
    };
    DONE
}

fn set_timestamp(c: &mut Controller, command: &Command) -> AdminResult {
    let mut bytes = [0; 8];
    c.read_host(command, &mut bytes)?;
    let value = u64::from_le_bytes(bytes) & 0xffff_ffff_ffff;
    let previous = c.admin.features.timestamp_bytes();
    c.admin.features.timestamp = Timestamp {
        value,
        set_at: Since::now(),
        origin: ORIGIN_SET,
    };
    c.record_timestamp(previous);
    DONE
}

fn set_host_behavior(c: &mut Controller, command: &Command) -> AdminResult {
    let mut bytes = [0; size_of::<HostBehavior>()];
    c.read_host(command, &mut bytes)?;
    let wanted = HostBehavior::read_from_bytes(&bytes).map_err(|_| INVALID_FIELD)?;
    let accepted = accepted(&wanted, c.config.may_have_metadata());
    c.admin.features.host_behavior = accepted.ok_or(INVALID_FIELD)?;
    DONE
}

fn set_lba_status_attributes(c: &mut Controller, command: &Command) -> AdminResult {
    let attributes = lba_status::attributes(command.cdw11.get() as u16);
    c.admin.features.lsiri = attributes.lsiri();
    c.admin.rearm();
    Ok(AdminOutcome::Done(attributes.into_bits()))
}

fn host_identifier(c: &Controller, get: &Query<'_>) -> Result<u32, Status> {
    let len = if get.cdw11() & 1 != 0 { 16 } else { 8 };
    get.data(c, prefix(&get.features.host_identifier, len))
}

/// Reads the host identifier of a Set Features command: 16 bytes if it is extended, otherwise 8.
fn read_host_identifier(c: &Controller, command: &Command) -> Result<([u8; 16], bool), Status> {
    let extended = command.cdw11.get() & 1 != 0;
    let mut id = [0; 16];
    let wanted = if extended { &mut id[..] } else { &mut id[..8] };
    c.read_host(command, wanted)?;
    Ok((id, extended))
}

fn set_host_identifier(c: &mut Controller, command: &Command) -> AdminResult {
    (c.admin.features.host_identifier, _) = read_host_identifier(c, command)?;
    DONE
}

/// Refuses any host identifier but the configured one. A guest that could choose it could
/// impersonate another host.
fn keep_host_identifier(c: &mut Controller, command: &Command) -> AdminResult {
    let (id, extended) = read_host_identifier(c, command)?;
    let host = c.host();
    if host.is_some_and(|host| id == *host.bytes() && extended == host.is_extended()) {
        DONE
    } else {
        Err(Status::FEATURE_NOT_CHANGEABLE.with_dnr(true))
    }
}

fn set_notification_mask(c: &mut Controller, command: &Command) -> AdminResult {
    let cdw11 = command.cdw11.get();
    let chosen = c.namespaces_under(command.nsid.get());
    let masks = &mut c.admin.features.notification_masks;
    masks.extend(chosen.into_iter().map(|n| (n, cdw11 & 0xe)));
    DONE
}

fn set_persistence(c: &mut Controller, command: &Command) -> AdminResult {
    let nsid = command.nsid.get();
    let ptpl = ReservationPersistence::from_bits(command.cdw11.get()).ptpl();
    let one = (nsid != NSID_BROADCAST).then_some(nsid);
    if c.set_persistence(command.cid.get(), one, ptpl) {
        return Ok(AdminOutcome::Later);
    }
    DONE
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn feature_has_one_row_in_each_controller() {
        for bits in 0..8 {
            let offer = Offer {
                shared: bits & 1 != 0,
                placed: bits & 2 != 0,
                marks: bits & 4 != 0,
            };
            let fids: BTreeSet<u8> = offered(offer).map(|(fid, _)| fid.0).collect();
            assert_eq!(fids.len(), offered(offer).count());
        }
    }
}
