//! Get Features and Set Features (NVMe Base 2.1, 5.1.11 and 5.1.25).

use crate::bytes::{pattern, u16_at, u32_at, u64_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE, admin};
use crate::info::ALL;
use crate::verdict::{Check, Expect, Verdict, applies_if, require, same};
use nvme::{AdminOpcode, Status};
use std::time::{Duration, Instant};

cases! {
    features_mandatory_current, ["1.2-1"], Always, Admin, "Base 2.1, 5.1.11",
        "the current value (Select 000b) of each mandatory feature can be read";
    features_default, ["1.2-2"], If("ONCS bit 4"), Admin, "Base 2.1, 5.1.11",
        "the default value (Select 001b) can be read, and is the current one after a reset";
    features_saved, ["1.2-3"], If("ONCS bit 4"), Admin, "Base 2.1, 5.1.11",
        "the saved value (Select 010b) of a feature that cannot be saved is the default one";
    features_capabilities, ["1.2-4"], If("ONCS bit 4"), Admin, "Base 2.1, 5.1.11",
        "what a feature can do (Select 011b) has no reserved bit";
    features_reserved_select, ["1.2-5"], If("ONCS bit 4"), Admin, "Base 2.1, 5.1.11",
        "reserved values of Select are Invalid Field in Command";
    features_reserved_identifiers, ["1.2-a"], Always, Admin, "Base 2.1, 5.1.11, 5.1.25",
        "identifiers that are reserved are Invalid Field in Command, to be read and to be set";
    features_changeable, ["1.8-a"], Always, Admin, "Base 2.1, 5.1.25",
        "a feature is read as it was set";
    features_not_saveable, ["1.9-a"], If("ONCS bit 4"), Admin, "Base 2.1, 5.1.25",
        "Save is Feature Identifier Not Saveable where Select 011b says so, and nothing is changed";
    features_reset, ["1.9-b"], Always, Admin, "Base 2.1, 4.4",
        "after a controller reset features that cannot be saved have their default value";
    features_not_namespace_specific, ["1.2-b"], If("ONCS bit 4"), Admin, "Base 2.1, 4.4",
        "a feature of the controller set for a namespace is Feature Not Namespace Specific";
    features_namespace_invalid, ["1.2-c"], If("Error Recovery is namespace specific"), Admin,
        "Base 2.1, 4.4", "a feature of namespaces for an NSID above NN is Invalid Namespace or \
         Format";
    feature_arbitration, [], Always, Admin, "Base 2.1, 5.1.25.1.1",
        "the arbitration burst keeps its value";
    feature_power_management, ["3.3-b"], Always, Admin, "Base 2.1, 5.1.25.1.2",
        "each power state up to NPSS can be set and is read, one above is Invalid Field in Command";
    feature_temperature_threshold, [], Always, Admin, "Base 2.1, 5.1.25.1.3",
        "thresholds keep their values, over and under apart; reserved types are refused";
    feature_number_of_queues, ["1.4-a"], Always, Admin, "Base 2.1, 5.1.25.2.1",
        "the number of queues is told, the same by Get Features; FFFFh is Invalid Field in Command";
    feature_number_of_queues_late, ["1.4-11"], Always, Io, "Base 2.1, 5.1.25.2.1",
        "the number of queues after one was created is Command Sequence Error";
    feature_interrupt_vector, [], Always, Admin, "Base 2.1, 5.1.25.2.3",
        "coalescing is disabled for a vector by itself; a vector that is not there is refused";
    feature_write_cache, ["2.6-a"], If("VWC bit 0"), Admin, "Base 2.1, 5.1.25.1.4",
        "the write cache is turned off and on, as is read; without one the feature is refused";
    feature_write_cache_off_keeps_data, [], If("VWC bit 0"), Io, "Base 2.1, 5.1.25.1.4",
        "data written while the write cache is turned off are there";
    feature_timestamp, ["1.2-d"], If("ONCS bit 6"), Admin, "Base 2.1, 5.1.25.1.7",
        "the timestamp continues from the set value, and reports its origin";
    feature_host_identifier, ["7-a"], If("CTRATT bit 0"), Admin, "Base 2.1, 5.1.25.1.28",
        "the host identifier is read in 16 bytes where CTRATT says so";
    feature_command_set_profile, ["1.2-e"], If("CAP.CSS bit 6"), Admin, "Base 2.1, 5.1.25.1",
        "a combination of command sets that is not there is refused";
    feature_host_memory_buffer_absent, ["3.4-a"], If("HMPRE is 0"), Admin, "Base 2.1, 5.1.25.2.4",
        "without a wish for host memory the feature is Invalid Field in Command";
    features_not_offered, ["3.13-a", "1.2-f"], Always, Admin, "Base 2.1, 5.1.25",
        "features whose capability bit is 0 are Invalid Field in Command";
    feature_event_configuration, ["1.7-a"], Always, Admin, "Base 2.1, 5.1.25.1.5",
        "the configuration of events keeps its value";
    feature_keep_alive, ["1.24-a"], If("KAS"), Admin, "Base 2.1, 5.1.25.1.8, 3.9",
        "Keep Alive succeeds, and CSTS.CFS tells when it is missing for longer than KATO";
}

/// Mandatory for an I/O controller: Arbitration, Power Management, Temperature Threshold, Number of
/// Queues, Interrupt Coalescing, Interrupt Vector Configuration, Write Atomicity, Asynchronous
/// Event Configuration.
const MANDATORY: [u8; 8] = [0x01, 0x02, 0x04, 0x07, 0x08, 0x09, 0x0a, 0x0b];
/// Feature identifier of Error Recovery, which may apply to a namespace or to the controller.
const ERROR_RECOVERY: u8 = 0x05;

fn select(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.oncs(4),
        "ONCS bit 4 is 0: there is no Select",
    )
}

fn first_nsid(host: &mut Host) -> Check<u32> {
    Ok(host.nsids()?.first().copied().unwrap_or(1))
}

fn features_mandatory_current(host: &mut Host) -> Check {
    for fid in MANDATORY {
        host.get_feature(fid, 0, 0, 0)?
            .succeeds(&format!("Get Features {fid:02x}h"))?;
    }
    let nsid = first_nsid(host)?;
    host.get_feature(ERROR_RECOVERY, 0, nsid, 0)?
        .succeeds("Get Features 05h of a namespace")
}

fn features_default(host: &mut Host) -> Check {
    select(host)?;
    for fid in MANDATORY {
        let default = host.get_feature(fid, 1, 0, 0)?;
        default.succeeds(&format!("Get Features {fid:02x}h, default"))?;
        let current = host.get_feature(fid, 0, 0, 0)?;
        same!(
            current.dw0(),
            default.dw0(),
            "current value of feature {fid:02x}h after a reset, against the default one"
        );
    }
    Ok(())
}

fn features_saved(host: &mut Host) -> Check {
    select(host)?;
    for fid in MANDATORY {
        let can = host.get_feature(fid, 3, 0, 0)?;
        can.succeeds(&format!("Get Features {fid:02x}h, capabilities"))?;
        let saved = host.get_feature(fid, 2, 0, 0)?;
        saved.succeeds(&format!("Get Features {fid:02x}h, saved"))?;
        if can.dw0() & 1 == 0 {
            let default = host.get_feature(fid, 1, 0, 0)?;
            same!(
                saved.dw0(),
                default.dw0(),
                "saved value of feature {fid:02x}h, which cannot be saved"
            );
        }
    }
    Ok(())
}

fn features_capabilities(host: &mut Host) -> Check {
    select(host)?;
    for fid in MANDATORY.into_iter().chain([ERROR_RECOVERY]) {
        let can = host.get_feature(fid, 3, 0, 0)?;
        can.succeeds(&format!("Get Features {fid:02x}h, capabilities"))?;
        same!(
            can.dw0() >> 3,
            0u32,
            "reserved bits of what feature {fid:02x}h can do"
        );
    }
    let can = host.get_feature(0x0b, 3, 0, 0)?;
    require!(
        can.dw0() & 4 != 0,
        "the configuration of events cannot be changed"
    );
    Ok(())
}

fn features_reserved_select(host: &mut Host) -> Check {
    select(host)?;
    for sel in 4..8 {
        host.get_feature(0x01, sel, 0, 0)?
            .refused(Status::INVALID_FIELD, &format!("Select {sel}"))?;
    }
    Ok(())
}

fn features_reserved_identifiers(host: &mut Host) -> Check {
    // 00h, of the standard's range, of the management interface's, of the NVM command set's.
    for fid in [0x00, 0x2f, 0x5f, 0x70, 0x8f, 0xbf] {
        host.get_feature(fid, 0, 0, 0)?
            .refused(Status::INVALID_FIELD, &format!("Get Features {fid:02x}h"))?;
        host.set_feature(fid, 0, 0)?
            .refused(Status::INVALID_FIELD, &format!("Set Features {fid:02x}h"))?;
    }
    Ok(())
}

/// Identifiers of the features that a case changes, each with the new value.
const TRIED: [(u8, u32); 4] = [
    (0x04, 0x0150),
    (0x08, 0x0203),
    (0x0a, 1),
    (0x0b, 0x0000_0003),
];

fn features_changeable(host: &mut Host) -> Check {
    for (fid, value) in TRIED {
        host.set_feature(fid, 0, value)?
            .succeeds(&format!("Set Features {fid:02x}h"))?;
        let entry = host.get_feature(fid, 0, 0, value & 0xffff_0000)?;
        entry.succeeds(&format!("Get Features {fid:02x}h"))?;
        same!(entry.dw0(), value, "feature {fid:02x}h after it was set");
        // By the broadcast NSID as well.
        host.set_feature(fid, ALL, value)?
            .succeeds(&format!("Set Features {fid:02x}h for all namespaces"))?;
    }
    let nsid = first_nsid(host)?;
    host.set_feature(ERROR_RECOVERY, nsid, 77)?
        .succeeds("Set Features 05h")?;
    let entry = host.get_feature(ERROR_RECOVERY, 0, nsid, 0)?;
    same!(entry.dw0(), 77u32, "Error Recovery of namespace {nsid}");
    Ok(())
}

fn features_not_saveable(host: &mut Host) -> Check {
    select(host)?;
    for (fid, value) in TRIED {
        let can = host.get_feature(fid, 3, 0, 0)?.dw0();
        if can & 1 != 0 {
            continue;
        }
        let before = host.get_feature(fid, 0, 0, 0)?.dw0();
        let command = admin(AdminOpcode::SET_FEATURES, 0)
            .dw(10, 1 << 31 | u32::from(fid))
            .dw(11, value);
        host.admin(command)?.refused(
            Status::FEATURE_NOT_SAVEABLE,
            &format!("Set Features {fid:02x}h with Save"),
        )?;
        let after = host.get_feature(fid, 0, 0, 0)?.dw0();
        same!(
            after,
            before,
            "feature {fid:02x}h after it could not be saved"
        );
    }
    Ok(())
}

fn features_reset(host: &mut Host) -> Check {
    let select = host.controller()?.oncs(4);
    let mut before = Vec::new();
    for (fid, value) in TRIED {
        let now = host.get_feature(fid, 0, 0, 0)?.dw0();
        // The current value may be left from an earlier host, so the default is read.
        let default = if select {
            host.get_feature(fid, 1, 0, 0)?.dw0()
        } else {
            now
        };
        before.push(default);
        host.set_feature(fid, 0, if default == value { value ^ 1 } else { value })?
            .succeeds(&format!("Set Features {fid:02x}h"))?;
    }
    host.disable()?;
    host.enable()?;
    for ((fid, _), before) in TRIED.into_iter().zip(before) {
        let after = host.get_feature(fid, 0, 0, 0)?.dw0();
        same!(after, before, "feature {fid:02x}h after a controller reset");
    }
    Ok(())
}

fn features_not_namespace_specific(host: &mut Host) -> Check {
    select(host)?;
    let nsid = first_nsid(host)?;
    for (fid, value) in TRIED {
        let can = host.get_feature(fid, 3, 0, 0)?.dw0();
        if can & 2 == 0 {
            host.set_feature(fid, nsid, value)?.refused(
                Status::FEATURE_NOT_NAMESPACE_SPECIFIC,
                &format!("Set Features {fid:02x}h for namespace {nsid}"),
            )?;
        }
    }
    Ok(())
}

fn features_namespace_invalid(host: &mut Host) -> Check {
    select(host)?;
    let can = host.get_feature(ERROR_RECOVERY, 3, 0, 0)?.dw0();
    applies_if(can & 2 != 0, "Error Recovery is not namespace specific")?;
    let above = host.controller()?.nn().saturating_add(1);
    host.get_feature(ERROR_RECOVERY, 0, above, 0)?.refused(
        Status::INVALID_NAMESPACE_OR_FORMAT,
        "Get Features 05h of an NSID above NN",
    )?;
    host.set_feature(ERROR_RECOVERY, above, 1)?.refused(
        Status::INVALID_NAMESPACE_OR_FORMAT,
        "Set Features 05h of an NSID above NN",
    )
}

fn feature_arbitration(host: &mut Host) -> Check {
    for burst in [0u32, 3, 7] {
        host.set_feature(0x01, 0, burst)?
            .succeeds("Set Features 01h")?;
        let entry = host.get_feature(0x01, 0, 0, 0)?;
        same!(entry.dw0() & 7, burst, "arbitration burst");
    }
    Ok(())
}

fn feature_power_management(host: &mut Host) -> Check {
    let npss = u32::from(host.controller()?.npss());
    for state in (0..=npss).rev() {
        host.set_feature(0x02, 0, state)?
            .succeeds(&format!("power state {state} of {npss}"))?;
        let entry = host.get_feature(0x02, 0, 0, 0)?;
        same!(entry.dw0() & 0x1f, state, "power state");
    }
    if npss < 31 {
        host.set_feature(0x02, 0, npss + 1)?
            .refused(Status::INVALID_FIELD, "a power state above NPSS")?;
    }
    Ok(())
}

fn feature_temperature_threshold(host: &mut Host) -> Check {
    let (over, under) = (0x0160u32, 0x0101u32);
    host.set_feature(0x04, 0, over)?
        .succeeds("the over threshold")?;
    host.set_feature(0x04, 0, 1 << 20 | under)?
        .succeeds("the under threshold")?;
    let found = host.get_feature(0x04, 0, 0, 0)?.dw0() & 0xffff;
    same!(found, over, "over threshold");
    let found = host.get_feature(0x04, 0, 0, 1 << 20)?.dw0() & 0xffff;
    same!(found, under, "under threshold");
    for kind in [2u32, 3] {
        host.set_feature(0x04, 0, kind << 20 | over)?
            .refused(Status::INVALID_FIELD, &format!("threshold type {kind}"))?;
    }
    Ok(())
}

fn feature_number_of_queues(host: &mut Host) -> Check {
    let entry = host.set_feature(0x07, 0, 0x0003_0003)?;
    entry.succeeds("Set Features 07h")?;
    let told = entry.dw0();
    let entry = host.get_feature(0x07, 0, 0, 0)?;
    same!(entry.dw0(), told, "Number of Queues by Get Features");
    for value in [0xffffu32, 0xffff_0000, 0xffff_ffff] {
        host.set_feature(0x07, 0, value)?.refused(
            Status::INVALID_FIELD,
            &format!("Number of Queues {value:#x}"),
        )?;
    }
    Ok(())
}

fn feature_number_of_queues_late(host: &mut Host) -> Check {
    host.set_feature(0x07, 0, 0x0001_0001)?.refused(
        Status::COMMAND_SEQUENCE_ERROR,
        "Number of Queues with a queue",
    )
}

fn feature_interrupt_vector(host: &mut Host) -> Check {
    let [_, _, low, high] = match super::pci::capabilities(host)?
        .iter()
        .find(|(id, _)| *id == 0x11)
    {
        Some((_, at)) => host.read_config::<4>(*at)?,
        None => return crate::verdict::not_applicable("there is no MSI-X"),
    };
    let vectors = u32::from(u16_at(&[low, high], 0) & 0x7ff) + 1;
    if vectors > 1 {
        host.set_feature(0x09, 0, 1 << 16 | 1)?
            .succeeds("coalescing disabled for vector 1")?;
        let entry = host.get_feature(0x09, 0, 0, 1)?;
        same!(
            entry.dw0(),
            1u32 << 16 | 1,
            "Interrupt Vector Configuration of vector 1"
        );
        if vectors > 2 {
            let entry = host.get_feature(0x09, 0, 0, 2)?;
            same!(
                entry.dw0() & 0xffff,
                2u32,
                "vector of Interrupt Vector Configuration"
            );
        }
    }
    host.set_feature(0x09, 0, vectors)?.refused(
        Status::INVALID_FIELD,
        &format!("vector {vectors}, the first that is not there"),
    )
}

fn feature_write_cache(host: &mut Host) -> Check {
    if host.controller()?.vwc() & 1 == 0 {
        host.get_feature(0x06, 0, 0, 0)?.refused(
            Status::INVALID_FIELD,
            "Get Features 06h without a write cache",
        )?;
        return host.set_feature(0x06, 0, 1)?.refused(
            Status::INVALID_FIELD,
            "Set Features 06h without a write cache",
        );
    }
    for on in [0u32, 1, 0, 1] {
        host.set_feature(0x06, 0, on)?
            .succeeds("Set Features 06h")?;
        let entry = host.get_feature(0x06, 0, 0, 0)?;
        same!(entry.dw0() & 1, on, "write cache enable");
    }
    Ok(())
}

fn feature_write_cache_off_keeps_data(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.vwc() & 1 != 0,
        "VWC bit 0 is 0: there is no write cache",
    )?;
    let ns = host.namespace()?;
    let data = pattern(21, 16 * ns.block as usize);
    host.set_feature(0x06, 0, 1)?.succeeds("write cache on")?;
    host.write(&ns, 128, &data)?;
    host.set_feature(0x06, 0, 0)?.succeeds("write cache off")?;
    host.holds(&ns, 128, &data, "after the write cache was turned off")
}

fn feature_timestamp(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.oncs(6),
        "ONCS bit 6 is 0: there is no timestamp",
    )?;
    let at = host.alloc(PAGE)?;
    let set = 0x0000_0123_4567_0000u64;
    host.put(at, &set.to_le_bytes())?;
    let command = admin(AdminOpcode::SET_FEATURES, 0).prp(at, 0).dw(10, 0x0e);
    host.admin(command)?.succeeds("Set Features 0Eh")?;
    std::thread::sleep(Duration::from_millis(20));
    let to = host.alloc(PAGE)?;
    let command = admin(AdminOpcode::GET_FEATURES, 0).prp(to, 0).dw(10, 0x0e);
    host.admin(command)?.succeeds("Get Features 0Eh")?;
    let data = host.get(to, 8)?;
    let found = u64_at(&data, 0) & 0xffff_ffff_ffff;
    require!(
        found >= set + 10 && found < set + 60_000,
        "the timestamp is {found:#x}, 20 ms after {set:#x} was set"
    );
    same!(
        data.get(6).copied().unwrap_or(0) >> 1 & 7,
        1u8,
        "origin of the timestamp"
    );
    same!(
        data.get(7).copied().unwrap_or(0),
        0u8,
        "reserved byte 7 of the timestamp"
    );
    Ok(())
}

fn feature_host_identifier(host: &mut Host) -> Check {
    applies_if(host.controller()?.ctratt() & 1 != 0, "CTRATT bit 0 is 0")?;
    let at = host.alloc(PAGE)?;
    host.put(at, &[0xa5; 32])?;
    let command = admin(AdminOpcode::GET_FEATURES, 0)
        .prp(at, 0)
        .dw(10, 0x81)
        .dw(11, 1);
    host.admin(command)?
        .succeeds("the extended host identifier")?;
    let data = host.get(at, 32)?;
    same!(
        u64_at(&data, 16),
        0xa5a5_a5a5_a5a5_a5a5u64,
        "memory behind the 16 bytes"
    );
    Ok(())
}

fn feature_command_set_profile(host: &mut Host) -> Check {
    applies_if(host.cap.css().iocss(), "CAP.CSS bit 6 is 0")?;
    let page = host.identify_raw(0xffff << 16 | 0x1c, 0, 0)?.1;
    let unused = (0..512usize)
        .find(|n| u64_at(&page, 8 * n) == 0)
        .unwrap_or(511);
    host.set_feature(0x19, 0, unused as u32)?.expect(
        Status::IO_COMMAND_SET_COMBINATION_REJECTED,
        "a combination of command sets that is not there",
    )
}

fn feature_host_memory_buffer_absent(host: &mut Host) -> Check {
    let wish = u32_at(&host.controller()?.0, 272);
    applies_if(wish == 0, "HMPRE is not zero")?;
    host.set_feature(0x0d, 0, 1)?
        .refused(Status::INVALID_FIELD, "Set Features 0Dh")?;
    host.get_feature(0x0d, 0, 0, 0)?
        .refused(Status::INVALID_FIELD, "Get Features 0Dh")
}

fn features_not_offered(host: &mut Host) -> Check {
    let controller = host.controller()?;
    let page = &controller.0;
    let bit = |at: usize, bit: u32| u32_at(page, at) >> bit & 1 != 0;
    let features = [
        (
            0x0cu8,
            bit(265, 0),
            "autonomous power state transitions (APSTA)",
        ),
        (
            0x10,
            bit(322, 0),
            "host controlled thermal management (HCTMA)",
        ),
        (
            0x11,
            bit(96, 1),
            "non-operational power states (CTRATT bit 1)",
        ),
        (0x12, bit(96, 3), "read recovery levels (CTRATT bit 3)"),
        (0x13, bit(96, 5), "predictable latency mode (CTRATT bit 5)"),
        (0x17, controller.sanicap() & 7 != 0, "Sanitize (SANICAP)"),
        (0x18, bit(96, 4), "endurance groups (CTRATT bit 4)"),
        (0x1d, bit(96, 19), "flexible data placement (CTRATT bit 19)"),
        (0x82, controller.oncs(5), "reservations (ONCS bit 5)"),
        (
            0x84,
            u32_at(page, 531) & 1 != 0,
            "namespace write protection (NWPC bit 0)",
        ),
    ];
    let nsid = first_nsid(host)?;
    for (fid, offered, what) in features {
        if !offered {
            let entry = host.get_feature(fid, 0, if fid >= 0x82 { nsid } else { 0 }, 0)?;
            entry.refused(
                Status::INVALID_FIELD,
                &format!("Get Features {fid:02x}h without {what}"),
            )?;
        }
    }
    Ok(())
}

fn feature_event_configuration(host: &mut Host) -> Check {
    // Only events that OAES offers, and the bits of the SMART warnings.
    let oaes = u32_at(&host.controller()?.0, 92);
    let value = oaes & 0x0000_ff00 | 0x1f;
    host.set_feature(0x0b, 0, value)?
        .succeeds("Set Features 0Bh")?;
    let entry = host.get_feature(0x0b, 0, 0, 0)?;
    same!(entry.dw0(), value, "configuration of events");
    Ok(())
}

/// Number of attempts to keep a timer alive; load on the machine may spoil some.
const ATTEMPTS: u32 = 50;
/// Time in which a controller on a loaded machine must notice that its host is silent.
const NOTICED: Duration = Duration::from_secs(60);

fn feature_keep_alive(host: &mut Host) -> Check {
    let kas = u64::from(host.controller()?.kas()) * 100;
    applies_if(kas != 0, "KAS is zero: there is no keep alive timer")?;
    applies_if(
        kas <= 2000,
        "the granularity of the keep alive timer is above 2 s",
    )?;
    let kato = kas.max(300);
    for _ in 0..ATTEMPTS {
        let set = Instant::now();
        host.set_feature(0x0f, 0, kato as u32)?
            .succeeds("Set Features 0Fh")?;
        let told = u64::from(host.get_feature(0x0f, 0, 0, 0)?.dw0());
        require!(
            told >= kato && told <= kato + kas,
            "KATO {kato} ms was set, {told} ms is read"
        );
        let told = Duration::from_millis(told);
        if let Some(last) = kept_alive(host, told, set)? {
            silent_too_long(host, told, last)?;
            host.disable()?;
            host.enable()?;
            require!(!host.csts()?.cfs(), "CSTS.CFS stays after a reset");
            return Ok(());
        }
        host.disable()?;
        host.enable()?;
    }
    Err(Verdict::Failed(format!(
        "this program was never run in time to send Keep Alive within {kato} ms"
    )))
}

/// Keeps a timer alive for twice its time, and returns when the last command was sent. `last` is
/// the time of the command that set the timer. Returns `None` when this program did not run for so
/// long that the controller may have failed.
fn kept_alive(host: &mut Host, told: Duration, mut last: Instant) -> Check<Option<Instant>> {
    for _ in 0..8 {
        std::thread::sleep(told / 4);
        let now = Instant::now();
        let cid = host.submit(0, admin(AdminOpcode::KEEP_ALIVE, 0))?;
        if last.elapsed() > told {
            return Ok(None);
        }
        last = now;
        host.wait_for(0, cid)?.succeeds("Keep Alive")?;
    }
    Ok(Some(last))
}

/// Waits for the controller to fail, which it must not do before the time has passed since the last
/// command.
fn silent_too_long(host: &mut Host, told: Duration, last: Instant) -> Check {
    while !host.csts()?.cfs() {
        require!(
            last.elapsed() < NOTICED,
            "CSTS.CFS is 0 although Keep Alive did not come within KATO"
        );
        std::thread::sleep(told / 30);
    }
    let after = last.elapsed();
    require!(
        after >= told,
        "CSTS.CFS is set {after:?} after a Keep Alive, before KATO ({told:?}) has passed"
    );
    Ok(())
}
