//! Identify data of zoned namespaces (Zoned Namespace Command Set 1.1).

use super::zoned::{CSI, effects, enable, listed, present, zoned};
use crate::bytes::{u8_at, u16_at, u32_at, u64_at};
use crate::case::{Need::*, cases};
use crate::host::Host;
use crate::verdict::{Check, Expect, applies_if, require, same};
use nvme::NvmOpcode as Op;

cases! {
    zns_lists, [], If("ZNS"), Disabled, "ZNS 1.1, 4.1.5",
        "zoned namespaces are in the list of their command set, and their descriptors say so; a \
         combination of Identify has the command set";
    zns_namespace, [], If("ZNS"), Disabled, "ZNS 1.1, 4.1.5.1",
        "the namespace consists of whole zones, open resources are no more than active ones, and \
         reserved bytes are zero";
    zns_controller, [], If("ZNS"), Disabled, "ZNS 1.1, 4.1.5.2",
        "ZASL is no larger than MDTS, and reserved bytes are zero";
    zns_commands, [], If("ZNS"), Disabled, "ZNS 1.1, 2.2.1",
        "the log page of supported commands has the mandatory ones of the command set";
    zns_hidden, [], If("ZNS"), Disabled, "Base 2.1, 5.1.13.2.3",
        "with CC.CSS of the NVM command set alone zoned namespaces are in no list";
}

fn zns_lists(host: &mut Host) -> Check {
    enable(host)?;
    let zoned = listed(host)?;
    applies_if(!zoned.is_empty(), "there is no zoned namespace")?;
    let all = host.nsids()?;
    for nsid in &all {
        let page = host.identify(3, *nsid)?;
        let mut at = 0;
        let mut csi = None;
        while u8_at(&page, at) != 0 {
            if u8_at(&page, at) == 4 {
                csi = Some(u8_at(&page, at + 4));
            }
            at += 4 + usize::from(u8_at(&page, at + 1));
        }
        let is_zoned = zoned.contains(nsid);
        require!(
            (csi == Some(2)) == is_zoned,
            "namespace {nsid}: its descriptor has CSI {csi:?}, the list of CSI 02h {zoned:?}"
        );
        if !is_zoned {
            let (entry, _) = host.identify_raw(5, *nsid, CSI)?;
            entry.fails("Identify CNS 05h, CSI 02h of a namespace without zones")?;
        }
    }
    let within = zoned.iter().all(|nsid| all.contains(nsid));
    require!(within, "zoned namespaces {zoned:?}, active ones {all:?}");
    let (entry, page) = host.identify_raw(0x1c, 0, 0)?;
    entry.succeeds("Identify, I/O Command Set data structure")?;
    let mut combinations = page.chunks_exact(8).map(|chunk| u64_at(chunk, 0));
    require!(
        combinations.any(|sets| sets >> 2 & 1 != 0),
        "no combination has the command set"
    );
    Ok(())
}

fn zns_namespace(host: &mut Host) -> Check {
    let all = present(host)?;
    for nsid in all {
        let z = zoned(host, nsid)?;
        same!(z.ns.blocks % z.size, 0u32, "blocks behind the last zone");
        if let Some(active) = z.active {
            let open = z.open.unwrap_or(u32::MAX);
            require!(open <= active, "MOR is {open}, and MAR {active}");
        }
        let (_, page) = host.identify_raw(5, nsid, CSI)?;
        same!(u16_at(&page, 0) >> 2, 0u16, "reserved bits of ZOC");
        same!(u16_at(&page, 2) >> 2, 0u16, "reserved bits of OZCS");
        let reserved = page.get(53..2816).unwrap_or_default();
        require!(
            reserved.iter().all(|byte| *byte == 0),
            "reserved bytes are not zero"
        );
        let (_, size, granularity) = z.areas;
        if z.has_areas() {
            require!(
                granularity > 0 && size > 0 && size % granularity == 0,
                "ZRWASZ is {size}, and ZRWAFG {granularity}"
            );
        } else {
            require!(
                page.get(44..53).is_some_and(|all| all == [0; 9]),
                "fields of Zone Random Write Areas, which are not supported"
            );
        }
    }
    Ok(())
}

fn zns_controller(host: &mut Host) -> Check {
    present(host)?;
    let (entry, page) = host.identify_raw(6, 0, CSI)?;
    entry.succeeds("Identify CNS 06h, CSI 02h")?;
    let mdts = u8_at(&host.controller()?.0, 77);
    let zasl = u8_at(&page, 0);
    require!(mdts == 0 || zasl <= mdts, "ZASL is {zasl}, and MDTS {mdts}");
    let reserved = page.get(1..).unwrap_or_default();
    require!(
        reserved.iter().all(|byte| *byte == 0),
        "reserved bytes are not zero"
    );
    Ok(())
}

fn zns_commands(host: &mut Host) -> Check {
    present(host)?;
    let page = effects(host)?;
    for opcode in [
        Op::FLUSH,
        Op::WRITE,
        Op::READ,
        Op::ZONE_MANAGEMENT_SEND,
        Op::ZONE_MANAGEMENT_RECEIVE,
    ] {
        let effects = u32_at(&page, 1024 + 4 * usize::from(opcode.0));
        same!(effects & 1, 1u32, "CSUPP of {opcode}");
    }
    Ok(())
}

fn zns_hidden(host: &mut Host) -> Check {
    enable(host)?;
    let zoned = listed(host)?;
    applies_if(!zoned.is_empty(), "there is no zoned namespace")?;
    applies_if(host.cap.css().ncss(), "CAP.CSS bit 0 is 0")?;
    host.disable()?;
    host.enable()?;
    let all = host.nsids()?;
    let seen = zoned.iter().find(|nsid| all.contains(nsid));
    require!(seen.is_none(), "namespace {seen:?} is in the active list");
    Ok(())
}
