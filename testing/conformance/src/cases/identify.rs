//! Identify (NVMe Base 2.1, 5.1.13; NVM Command Set 1.1, 4.1.5).

use crate::bytes::{first_nonzero, slice, u8_at, u16_at, u32_at, u64_at, u128_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE};
use crate::info::ALL;
use crate::verdict::{Check, Expect, applies_if, failed, require, same};
use nvme::Status;

cases! {
    identify_namespace, ["1.1-1"], Always, Admin, "NVM Command Set 1.1, 4.1.5.1",
        "Identify Namespace: sizes, formats and reserved bytes agree with each other";
    identify_namespace_capacity, ["1.1-1"], Always, Admin, "NVM Command Set 1.1, 4.1.5.1",
        "capacity and use are within the size, and the size is usable up to its last block";
    identify_namespace_inactive, ["1.1-1"], If("NN is larger than the largest active NSID"), Admin,
        "Base 2.1, 3.2.1.4", "an inactive NSID gives a data structure of zeroes";
    identify_nsid_invalid, ["1.1-1"], Always, Admin, "Base 2.1, 3.2.1.2",
        "NSID 0, and one larger than NN, are Invalid Namespace or Format";
    identify_nsid_broadcast, ["1.1-1"], Always, Admin, "Base 2.1, 5.1.13",
        "the broadcast NSID gives what is common to all namespaces with namespace management, and \
         is Invalid Namespace or Format without";
    identify_controller_text, ["1.1-2"], Always, Admin, "Base 2.1, 5.1.13.2.1, 1.4.2",
        "serial number, model and firmware revision are ASCII, left justified, padded by spaces";
    identify_controller_fields, ["1.1-2"], Always, Admin, "Base 2.1, 5.1.13.2.1",
        "type, version, limits and counts of Identify Controller have values that there are";
    identify_controller_subnqn, ["1.1-2"], Always, Admin, "Base 2.1, 4.7, 5.1.13.2.1",
        "SUBNQN is a name of a subsystem, ended by NUL";
    identify_controller_reserved, ["1.1-2"], Always, Admin, "Base 2.1, 5.1.13.2.1",
        "reserved bytes of Identify Controller are zero";
    identify_controller_any_nsid, ["1.1-2"], Always, Admin, "Base 2.1, 5.1.13",
        "Identify Controller is the same twice";
    identify_active_list, ["1.1-3"], Always, Admin, "Base 2.1, 5.1.13.2.2",
        "the list of active namespaces rises, ends by zeroes, and each is active";
    identify_active_list_behind, ["1.1-3"], Always, Admin, "Base 2.1, 5.1.13.2.2",
        "the list holds NSIDs behind the one of the command only";
    identify_active_list_last, ["1.1-3"], Always, Admin, "Base 2.1, 5.1.13.2.2",
        "NSIDs FFFFFFFEh and FFFFFFFFh are Invalid Namespace or Format for a list";
    identify_unknown_controller, ["1.1-4"], If("OACS bit 3, or CNS 13h"), Admin,
        "Base 2.1, 5.1.13", "a list of controllers from an ID on that none has is empty";
    identify_reserved_cns, ["1.1-5"], Always, Admin, "Base 2.1, 5.1.13.1",
        "CNS values that are reserved are Invalid Field in Command";
    identify_descriptors, ["1.1-6"], Always, Admin, "Base 2.1, 5.1.13",
        "namespace identification descriptors: lengths right, no type twice, as Identify Namespace";
    identify_descriptors_invalid, ["1.1-6"], Always, Admin, "Base 2.1, 5.1.13",
        "descriptors of NSID 0 and FFFFFFFFh are Invalid Namespace or Format";
    identify_unique_namespaces, [], If("two namespaces"), Admin, "Base 2.1, 4.5",
        "no two namespaces have the same NGUID or EUI-64";
    identify_command_set_namespace, ["1.1-a"], If("VS 2.0"), Admin, "Base 2.1, 5.1.13",
        "CNS 05h gives the NVM command set's data structure, and refuses other command sets";
    identify_command_set_controller, ["1.1-b"], If("VS 2.0"), Admin, "NVM Command Set 1.1, 4.1.5",
        "CNS 06h gives the NVM command set's limits, and refuses other command sets";
    identify_command_set_list, ["1.1-c"], If("VS 2.0"), Admin, "Base 2.1, 5.1.13",
        "CNS 07h lists the namespaces of the NVM command set";
    identify_independent_namespace, ["1.1-d"], If("VS 2.0"), Admin, "Base 2.1, 5.1.13",
        "CNS 08h agrees with Identify Namespace";
    identify_command_sets, ["1.1-e"], If("CAP.CSS bit 6"), Admin, "Base 2.1, 5.1.13",
        "CNS 1Ch has a combination with the NVM command set";
    identify_allocated_list, ["8.1-1"], If("OACS bit 3"), Admin, "Base 2.1, 5.1.13",
        "CNS 10h lists allocated namespaces, each of which CNS 11h describes";
    identify_attached_controllers, ["8.1-2"], If("OACS bit 3"), Admin, "Base 2.1, 5.1.13",
        "CNS 12h lists this controller for each active namespace";
    identify_all_controllers, ["8.1-3"], If("OACS bit 3"), Admin, "Base 2.1, 5.1.13",
        "CNS 13h lists this controller, in order";
    identify_atomic_sizes, ["2.8-a"], Always, Admin, "NVM Command Set 1.1, 2.1.4",
        "atomic write sizes and boundaries of controller and namespace are in order";
    identify_power_states, ["3.3-1", "3.3-a"], Always, Admin, "Base 2.1, 5.1.13.2.1",
        "power state descriptors: relative values within their range, zero behind the last one";
    identify_temperatures, [], Always, Admin, "Base 2.1, 5.1.13.2.1",
        "the critical temperature threshold is not below the warning one";
    identify_limits_of_copy, ["2.14-a"], If("ONCS bit 8"), Admin, "NVM Command Set 1.1, 4.1.5.1",
        "MSSRL, MCL and MSRC allow a copy, and CDFS has a format";
    identify_sharing, ["3.14-a"], Always, Admin, "Base 2.1, 5.1.13.2.1",
        "CMIC, NMIC and RESCAP agree with ONCS and ANA";
}

fn identify_namespace(host: &mut Host) -> Check {
    for nsid in host.nsids()? {
        let page = host.identify(0, nsid)?;
        let nlbaf = usize::from(u8_at(&page, 25));
        require!(nlbaf < 64, "NLBAF is {nlbaf}");
        let ns = host.namespace_of(nsid)?;
        require!(
            ns.format() <= nlbaf,
            "FLBAS is {}, NLBAF {nlbaf}",
            ns.format()
        );
        for format in 0..=nlbaf {
            let lbads = u8_at(&page, 128 + 4 * format + 2);
            require!(
                lbads == 0 || lbads >= 9,
                "LBADS of format {format} is {lbads}"
            );
        }
        if let Some(at) = first_nonzero(&page, 128 + 4 * (nlbaf + 1), 384) {
            return failed(format!(
                "byte {at} is not zero, behind the last of {nlbaf} formats"
            ));
        }
        for (from, to) in [(83, 84), (96, 99)] {
            if let Some(at) = first_nonzero(&page, from, to) {
                return failed(format!(
                    "reserved byte {at} of Identify Namespace is not zero"
                ));
            }
        }
        same!(u8_at(&page, 27) >> 2, 0u8, "reserved bits of MC");
        same!(u8_at(&page, 28) >> 5, 0u8, "reserved bits of DPC");
        same!(u8_at(&page, 29) >> 4, 0u8, "reserved bits of DPS");
        let (dpc, dps) = (u8_at(&page, 28), u8_at(&page, 29) & 7);
        require!(
            dps == 0 || dps <= 3 && dpc >> (dps - 1) & 1 != 0,
            "DPS has protection type {dps}, which DPC {dpc:#x} does not offer"
        );
    }
    Ok(())
}

fn identify_namespace_capacity(host: &mut Host) -> Check {
    let nsids = host.nsids()?;
    require!(!nsids.is_empty(), "there is no active namespace to look at");
    for nsid in nsids {
        let page = host.identify(0, nsid)?;
        let (nsze, ncap, nuse) = (u64_at(&page, 0), u64_at(&page, 8), u64_at(&page, 16));
        require!(nsze > 0, "NSZE of namespace {nsid} is zero");
        require!(
            ncap <= nsze,
            "NCAP {ncap:#x} of namespace {nsid} is above NSZE {nsze:#x}"
        );
        require!(
            nuse <= ncap,
            "NUSE {nuse:#x} of namespace {nsid} is above NCAP {ncap:#x}"
        );
        if u8_at(&page, 24) & 1 == 0 {
            same!(
                ncap,
                nsze,
                "NCAP of namespace {nsid}, which is not thinly provisioned"
            );
        }
    }
    let entries = host.io_entries();
    host.create_pair(1, entries)?;
    let ns = host.namespace()?;
    host.read(&ns, ns.blocks - 1, 1)?;
    Ok(())
}

fn identify_namespace_inactive(host: &mut Host) -> Check {
    let nn = host.controller()?.nn();
    let active = host.nsids()?;
    let Some(nsid) = (1..=nn.min(2000)).find(|nsid| !active.contains(nsid)) else {
        return crate::verdict::not_applicable("every NSID up to NN is active");
    };
    let page = host.identify(0, nsid)?;
    require!(
        page.iter().all(|byte| *byte == 0),
        "Identify Namespace of inactive NSID {nsid} is not zero"
    );
    Ok(())
}

fn identify_nsid_invalid(host: &mut Host) -> Check {
    let nn = host.controller()?.nn();
    for nsid in [0, nn.saturating_add(1), 0xffff_fffe] {
        let (entry, _) = host.identify_raw(0, nsid, 0)?;
        entry.refused(
            Status::INVALID_NAMESPACE_OR_FORMAT,
            &format!("Identify Namespace of NSID {nsid:#x}, NN is {nn}"),
        )?;
    }
    Ok(())
}

fn identify_nsid_broadcast(host: &mut Host) -> Check {
    let managed = host.controller()?.oacs(3);
    let (entry, page) = host.identify_raw(0, ALL, 0)?;
    if managed {
        entry.succeeds("Identify Namespace of all, with namespace management")?;
        require!(
            u8_at(&page, 130) >= 9,
            "there is no LBA format that is common to all"
        );
        return Ok(());
    }
    entry.refused(
        Status::INVALID_NAMESPACE_OR_FORMAT,
        "Identify Namespace of all, without namespace management",
    )
}

fn identify_controller_text(host: &mut Host) -> Check {
    let page = host.controller()?.0;
    for (name, from, to) in [("SN", 4, 24), ("MN", 24, 64), ("FR", 64, 72)] {
        let text = slice(&page, from, to);
        require!(
            text.iter().all(|byte| (0x20..=0x7e).contains(byte)),
            "{name} has bytes that are not ASCII: {text:x?}"
        );
        require!(text.iter().any(|byte| *byte != b' '), "{name} is empty");
        require!(text.first() != Some(&b' '), "{name} is not left justified");
    }
    Ok(())
}

fn identify_controller_fields(host: &mut Host) -> Check {
    let vs = host.read32(nvme::regs::VS)?;
    let controller = host.controller()?;
    let page = &controller.0;
    if vs >= 0x1_0400 {
        same!(u8_at(page, 111), 1u8, "CNTRLTYPE of an I/O controller");
    }
    require!(controller.nn() > 0, "NN is zero");
    let active = host.nsids()?;
    let most = active.last().copied().unwrap_or(0);
    require!(
        most <= controller.nn(),
        "NSID {most} is active, and NN is {}",
        controller.nn()
    );
    let mnan = u32_at(page, 540);
    require!(
        mnan <= controller.nn(),
        "MNAN {mnan} is above NN {}",
        controller.nn()
    );
    require!(controller.npss() <= 31, "NPSS is {}", controller.npss());
    require!(u8_at(page, 260) >> 1 & 7 != 0, "FRMW has no firmware slot");
    require!(
        u16_at(page, 522) & !1 == 0,
        "reserved bits of FUSES are set"
    );
    require!(
        controller.sgls() & 3 != 3,
        "SGLS bits 1:0 are 11b, which is reserved"
    );
    require!(
        controller.vwc() >> 1 & 3 != 1,
        "VWC bits 2:1 are 01b, which is reserved"
    );
    let flush = controller.vwc() >> 1 & 3;
    require!(
        vs < 0x1_0400 || flush != 0,
        "VWC does not say what Flush does for all namespaces"
    );
    require!(
        controller.cntlid() <= 0xffef,
        "CNTLID is {:#x}",
        controller.cntlid()
    );
    let (total, free) = (u128_at(page, 280), u128_at(page, 296));
    require!(
        total == 0 || free <= total,
        "UNVMCAP {free} is above TNVMCAP {total}"
    );
    Ok(())
}

fn identify_controller_subnqn(host: &mut Host) -> Check {
    let page = host.controller()?.0;
    let text = slice(&page, 768, 1024);
    let end = text.iter().position(|byte| *byte == 0);
    let Some(end) = end else {
        return failed("SUBNQN has no NUL within its 256 bytes");
    };
    let name = String::from_utf8_lossy(slice(text, 0, end)).into_owned();
    require!(name.starts_with("nqn."), "SUBNQN is {name:?}");
    require!(end <= 223, "SUBNQN has {end} bytes, 223 are allowed");
    let date = name.get(4..11).unwrap_or_default();
    let right = date.len() == 7
        && date.chars().enumerate().all(|(i, c)| match i {
            4 => c == '-',
            _ => c.is_ascii_digit(),
        });
    require!(right, "SUBNQN has no year and month: {name:?}");
    require!(
        first_nonzero(text, end, 256).is_none(),
        "bytes behind SUBNQN's NUL are not zero"
    );
    Ok(())
}

fn identify_controller_reserved(host: &mut Host) -> Check {
    let vs = host.read32(nvme::regs::VS)?;
    let page = host.controller()?.0;
    applies_if(
        vs <= 0x2_0100,
        "the version is newer than the layout that the case knows",
    )?;
    // Reserved bytes in NVMe Base 2.1. Bytes 1792 to 2047 are for fabrics.
    for (from, to) in [
        (104, 110),
        (134, 135),
        (136, 240),
        (240, 252),
        (362, 368),
        (592, 768),
        (1024, 1792),
    ] {
        if let Some(at) = first_nonzero(&page, from, to) {
            return failed(format!(
                "reserved byte {at} of Identify Controller is not zero"
            ));
        }
    }
    Ok(())
}

fn identify_controller_any_nsid(host: &mut Host) -> Check {
    let first = host.controller()?.0;
    let second = host.controller()?.0;
    require!(
        first == second,
        "Identify Controller differs from one time to the next"
    );
    Ok(())
}

fn identify_active_list(host: &mut Host) -> Check {
    let page = host.identify(2, 0)?;
    let all: Vec<u32> = page.chunks_exact(4).map(|chunk| u32_at(chunk, 0)).collect();
    let nsids = host.nsids()?;
    require!(
        nsids.is_sorted_by(|a, b| a < b),
        "the list does not rise: {nsids:?}"
    );
    require!(
        all.iter().skip(nsids.len()).all(|nsid| *nsid == 0),
        "there are NSIDs behind the zero that ends the list"
    );
    for nsid in nsids {
        require!(
            host.namespace_of(nsid)?.blocks > 0,
            "NSID {nsid} of the list is not active"
        );
    }
    Ok(())
}

fn identify_active_list_behind(host: &mut Host) -> Check {
    let nsids = host.nsids()?;
    for after in nsids.iter().copied().chain([ALL - 2]) {
        let page = host.identify(2, after)?;
        let found: Vec<u32> = page.chunks_exact(4).map(|chunk| u32_at(chunk, 0)).collect();
        let found: Vec<u32> = found.into_iter().take_while(|nsid| *nsid != 0).collect();
        let expected: Vec<u32> = nsids.iter().copied().filter(|nsid| *nsid > after).collect();
        require!(
            found == expected,
            "behind NSID {after:#x}: expected {expected:?}, got {found:?}"
        );
    }
    Ok(())
}

fn identify_active_list_last(host: &mut Host) -> Check {
    for nsid in [ALL - 1, ALL] {
        let (entry, _) = host.identify_raw(2, nsid, 0)?;
        entry.refused(
            Status::INVALID_NAMESPACE_OR_FORMAT,
            &format!("the list behind NSID {nsid:#x}"),
        )?;
    }
    Ok(())
}

fn ids(page: &[u8]) -> Vec<u16> {
    let count = usize::from(u16_at(page, 0)).min(2047);
    (1..=count).map(|n| u16_at(page, 2 * n)).collect()
}

fn identify_unknown_controller(host: &mut Host) -> Check {
    let controller = host.controller()?;
    let (entry, page) = host.identify_raw(0xffff << 16 | 0x13, 0, 0)?;
    applies_if(
        controller.oacs(3) || entry.status().is_success(),
        "without namespace management CNS 13h need not be there, and is not",
    )?;
    entry.succeeds("the list of controllers from FFFFh on")?;
    same!(u16_at(&page, 0), 0u16, "controllers from FFFFh on");
    Ok(())
}

fn identify_reserved_cns(host: &mut Host) -> Check {
    // Reserved in NVMe Base 2.1, and in all later ones so far.
    for cns in [0x0bu32, 0x0f, 0x24, 0x7f, 0xc0, 0xff] {
        let (entry, page) = host.identify_raw(cns, 0, 0)?;
        entry.refused(Status::INVALID_FIELD, &format!("CNS {cns:#x}"))?;
        require!(
            page.iter().all(|byte| *byte == 0xa5),
            "CNS {cns:#x} was refused, and has written to the buffer"
        );
    }
    Ok(())
}

/// Returns the namespace identification descriptors of a page: type and content of each.
fn descriptors(page: &[u8]) -> Check<Vec<(u8, Vec<u8>)>> {
    let (mut at, mut found) = (0, Vec::new());
    while at < page.len() && u8_at(page, at + 1) != 0 {
        let (kind, len) = (u8_at(page, at), usize::from(u8_at(page, at + 1)));
        let expected = match kind {
            1 => 8,
            2 | 3 => 16,
            4 => 1,
            _ => return failed(format!("descriptor type {kind} is reserved")),
        };
        same!(
            len as u64,
            expected as u64,
            "length of a descriptor of type {kind}"
        );
        require!(
            found.iter().all(|(other, _)| *other != kind),
            "there are two descriptors of type {kind}"
        );
        found.push((kind, slice(page, at + 4, at + 4 + len).to_vec()));
        at += 4 + len;
    }
    require!(
        first_nonzero(page, at, page.len()).is_none(),
        "bytes behind the last descriptor are not zero"
    );
    Ok(found)
}

fn identify_descriptors(host: &mut Host) -> Check {
    for nsid in host.nsids()? {
        let page = host.identify(3, nsid)?;
        let found = descriptors(&page)?;
        let namespace = host.identify(0, nsid)?;
        for (kind, from, to, name) in [(1u8, 120, 128, "EUI-64"), (2, 104, 120, "NGUID")] {
            let field = slice(&namespace, from, to);
            let there = found.iter().find(|(k, _)| *k == kind);
            match there {
                Some((_, id)) => require!(
                    id == field,
                    "{name} of the descriptor is {id:x?}, of Identify Namespace {field:x?}"
                ),
                None => require!(
                    field.iter().all(|byte| *byte == 0),
                    "Identify Namespace has a {name}, and there is no descriptor of it"
                ),
            }
        }
        require!(
            found.iter().any(|(kind, _)| (1..=3).contains(kind)),
            "namespace {nsid} has neither EUI-64 nor NGUID nor UUID"
        );
        if host.cap.css().iocss() {
            let csi = found.iter().find(|(kind, _)| *kind == 4);
            require!(csi.is_some(), "there is no descriptor of the command set");
        }
    }
    Ok(())
}

fn identify_descriptors_invalid(host: &mut Host) -> Check {
    for nsid in [0, ALL] {
        let (entry, _) = host.identify_raw(3, nsid, 0)?;
        entry.refused(
            Status::INVALID_NAMESPACE_OR_FORMAT,
            &format!("descriptors of NSID {nsid:#x}"),
        )?;
    }
    Ok(())
}

fn identify_unique_namespaces(host: &mut Host) -> Check {
    let nsids = host.nsids()?;
    applies_if(nsids.len() > 1, "there is one namespace only")?;
    let mut seen: Vec<Vec<u8>> = Vec::new();
    for nsid in nsids {
        let page = host.identify(0, nsid)?;
        for (from, to) in [(104, 120), (120, 128)] {
            let id = slice(&page, from, to).to_vec();
            if id.iter().any(|byte| *byte != 0) {
                require!(
                    !seen.contains(&id),
                    "two namespaces have the identifier {id:x?}"
                );
                seen.push(id);
            }
        }
    }
    Ok(())
}

fn version_2(host: &mut Host) -> Check {
    applies_if(
        host.read32(nvme::regs::VS)? >= 0x2_0000,
        "the version is older than 2.0",
    )
}

/// Identifier of a command set (CSI) that the controller does not have, in bits 31:24 of dword 11.
const OTHER_SET: u32 = 0x2f << 24;

fn identify_command_set_namespace(host: &mut Host) -> Check {
    version_2(host)?;
    for nsid in host.nsids()? {
        // For namespaces of other command sets the command is refused.
        let set = descriptors(&host.identify(3, nsid)?)?;
        let csi = set.iter().find(|(kind, _)| *kind == 4);
        if csi.is_none_or(|(_, csi)| u8_at(csi, 0) == 0) {
            host.identify(5, nsid)?;
        }
    }
    let nsid = host.nsids()?.first().copied().unwrap_or(1);
    let (entry, _) = host.identify_raw(5, nsid, OTHER_SET)?;
    entry.expect_one(
        &[Status::INVALID_FIELD, Status::INVALID_IO_COMMAND_SET],
        "CNS 05h with a command set that is not there",
    )?;
    let (entry, _) = host.identify_raw(5, 0, 0)?;
    entry.refused(Status::INVALID_NAMESPACE_OR_FORMAT, "CNS 05h of NSID 0")
}

fn identify_command_set_controller(host: &mut Host) -> Check {
    version_2(host)?;
    let page = host.identify(6, 0)?;
    let (ver, vs) = (u32_at(&page, 20), host.read32(nvme::regs::VS)?);
    if vs >= 0x2_0100 {
        require!(
            (0x1_0000..0x2_0000).contains(&ver),
            "the version of the NVM command set is {ver:#x}"
        );
    }
    let (entry, _) = host.identify_raw(6, 0, OTHER_SET)?;
    entry.expect_one(
        &[Status::INVALID_FIELD, Status::INVALID_IO_COMMAND_SET],
        "CNS 06h with a command set that is not there",
    )
}

fn identify_command_set_list(host: &mut Host) -> Check {
    version_2(host)?;
    let page = host.identify(7, 0)?;
    let found: Vec<u32> = page.chunks_exact(4).map(|chunk| u32_at(chunk, 0)).collect();
    let found: Vec<u32> = found.into_iter().take_while(|nsid| *nsid != 0).collect();
    let mut expected = Vec::new();
    for nsid in host.nsids()? {
        let set = descriptors(&host.identify(3, nsid)?)?;
        let csi = set.iter().find(|(kind, _)| *kind == 4);
        if csi.is_none_or(|(_, csi)| u8_at(csi, 0) == 0) {
            expected.push(nsid);
        }
    }
    require!(
        found == expected,
        "CNS 07h: expected {expected:?}, got {found:?}"
    );
    Ok(())
}

fn identify_independent_namespace(host: &mut Host) -> Check {
    version_2(host)?;
    for nsid in host.nsids()? {
        let (page, namespace) = (host.identify(8, nsid)?, host.identify(0, nsid)?);
        same!(
            u8_at(&page, 1),
            u8_at(&namespace, 30),
            "NMIC by CNS 08h and 00h"
        );
        same!(
            u8_at(&page, 2),
            u8_at(&namespace, 31),
            "RESCAP by CNS 08h and 00h"
        );
        same!(
            u32_at(&page, 4),
            u32_at(&namespace, 92),
            "ANAGRPID by CNS 08h and 00h"
        );
        same!(
            u8_at(&page, 8) & 1,
            u8_at(&namespace, 99) & 1,
            "NSATTR bit 0 by CNS 08h and 00h"
        );
        same!(u8_at(&page, 14) & 1, 1u8, "NSTAT bit 0, namespace ready");
    }
    let nn = host.controller()?.nn();
    let (entry, _) = host.identify_raw(8, nn.saturating_add(1), 0)?;
    entry.refused(
        Status::INVALID_NAMESPACE_OR_FORMAT,
        "CNS 08h of an NSID above NN",
    )
}

fn identify_command_sets(host: &mut Host) -> Check {
    applies_if(host.cap.css().iocss(), "CAP.CSS bit 6 is 0")?;
    let page = host.identify_raw(0xffff << 16 | 0x1c, 0, 0)?;
    page.0.succeeds("Identify CNS 1Ch")?;
    let first = u64_at(&page.1, 0);
    require!(
        first & 1 != 0,
        "combination 0 of command sets is {first:#x}"
    );
    Ok(())
}

fn managed(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.oacs(3),
        "OACS bit 3 is 0: there is no namespace management",
    )
}

fn identify_allocated_list(host: &mut Host) -> Check {
    managed(host)?;
    let page = host.identify(0x10, 0)?;
    let found: Vec<u32> = page.chunks_exact(4).map(|chunk| u32_at(chunk, 0)).collect();
    let found: Vec<u32> = found.into_iter().take_while(|nsid| *nsid != 0).collect();
    require!(
        found.is_sorted_by(|a, b| a < b),
        "the list does not rise: {found:?}"
    );
    for nsid in host.nsids()? {
        require!(
            found.contains(&nsid),
            "active namespace {nsid} is not allocated"
        );
    }
    for nsid in found {
        let page = host.identify(0x11, nsid)?;
        require!(
            page.iter().any(|byte| *byte != 0),
            "allocated namespace {nsid} is all zero"
        );
    }
    Ok(())
}

fn identify_attached_controllers(host: &mut Host) -> Check {
    managed(host)?;
    let own = host.controller()?.cntlid();
    for nsid in host.nsids()? {
        let found = ids(&host.identify(0x12, nsid)?);
        require!(
            found.contains(&own),
            "controller {own} is not in the list of {nsid}: {found:?}"
        );
    }
    Ok(())
}

fn identify_all_controllers(host: &mut Host) -> Check {
    managed(host)?;
    let own = host.controller()?.cntlid();
    let page = host.identify(0x13, 0)?;
    let found = ids(&page);
    require!(
        found.contains(&own),
        "controller {own} is not in the list: {found:?}"
    );
    require!(
        found.is_sorted_by(|a, b| a < b),
        "the list does not rise: {found:?}"
    );
    let behind = 2 + 2 * found.len();
    require!(
        first_nonzero(&page, behind, PAGE as usize).is_none(),
        "unused entries are not zero"
    );
    Ok(())
}

fn identify_atomic_sizes(host: &mut Host) -> Check {
    let controller = host.controller()?.0;
    let (awun, awupf, acwu) = (
        u16_at(&controller, 526),
        u16_at(&controller, 528),
        u16_at(&controller, 532),
    );
    require!(awupf <= awun, "AWUPF {awupf} is above AWUN {awun}");
    for nsid in host.nsids()? {
        let page = host.identify(0, nsid)?;
        if u8_at(&page, 24) & 2 != 0 {
            let (nawun, nawupf, nacwu) = (u16_at(&page, 34), u16_at(&page, 36), u16_at(&page, 38));
            require!(nawun >= awun, "NAWUN {nawun} is below AWUN {awun}");
            require!(nawupf >= awupf, "NAWUPF {nawupf} is below AWUPF {awupf}");
            require!(nawupf <= nawun, "NAWUPF {nawupf} is above NAWUN {nawun}");
            require!(nacwu >= acwu, "NACWU {nacwu} is below ACWU {acwu}");
        }
        let (nabsn, nabo, nabspf) = (u16_at(&page, 40), u16_at(&page, 42), u16_at(&page, 44));
        require!(
            nabo <= nabsn || nabsn == 0 && nabo == 0,
            "NABO {nabo} is above NABSN {nabsn}"
        );
        require!(
            nabspf == 0 || nabo <= nabspf,
            "NABO {nabo} is above NABSPF {nabspf}"
        );
        require!(
            nabsn == 0 || nabsn >= awun,
            "NABSN {nabsn} is below AWUN {awun}"
        );
        require!(
            nabspf == 0 || nabspf >= awupf,
            "NABSPF {nabspf} is below AWUPF {awupf}"
        );
    }
    Ok(())
}

fn identify_power_states(host: &mut Host) -> Check {
    let controller = host.controller()?;
    let npss = controller.npss();
    let count = npss + 1;
    for state in 0..count {
        let at = 2048 + 32 * usize::from(state);
        let what = ["RRT", "RRL", "RWT", "RWL"];
        for (i, name) in what.iter().enumerate() {
            let value = u8_at(&controller.0, at + 12 + i);
            require!(
                value & 0x1f < count && value >> 5 == 0,
                "{name} of power state {state} is {value}, and there are {count} states"
            );
        }
    }
    let behind = 2048 + 32 * usize::from(count);
    if let Some(at) = first_nonzero(&controller.0, behind, 3072) {
        return failed(format!(
            "byte {at} is not zero, behind the last of {count} power states"
        ));
    }
    Ok(())
}

fn identify_temperatures(host: &mut Host) -> Check {
    let page = host.controller()?.0;
    let (warning, critical) = (u16_at(&page, 266), u16_at(&page, 268));
    require!(
        critical == 0 || critical >= warning,
        "CCTEMP is {critical} K, WCTEMP {warning} K"
    );
    Ok(())
}

fn identify_limits_of_copy(host: &mut Host) -> Check {
    let controller = host.controller()?;
    applies_if(controller.oncs(8), "ONCS bit 8 is 0: there is no Copy")?;
    require!(
        u16_at(&controller.0, 534) != 0,
        "CDFS has no format of descriptors"
    );
    for nsid in host.nsids()? {
        let page = host.identify(0, nsid)?;
        let (mssrl, mcl) = (u16_at(&page, 74), u32_at(&page, 76));
        require!(mssrl > 0, "MSSRL of namespace {nsid} is zero");
        require!(
            mcl >= mssrl.into(),
            "MCL {mcl} of namespace {nsid} is below MSSRL {mssrl}"
        );
    }
    Ok(())
}

fn identify_sharing(host: &mut Host) -> Check {
    let controller = host.controller()?;
    let ana = controller.cmic() & 8 != 0;
    for nsid in host.nsids()? {
        let page = host.identify(0, nsid)?;
        let (rescap, group) = (u8_at(&page, 31), u32_at(&page, 92));
        require!(
            rescap == 0 || controller.oncs(5),
            "RESCAP of namespace {nsid} is {rescap:#x}, and ONCS bit 5 is 0"
        );
        require!(
            ana == (group != 0),
            "CMIC bit 3 is {}, and ANAGRPID of namespace {nsid} is {group}",
            u8::from(ana)
        );
        require!(
            group <= u32_at(&controller.0, 344),
            "ANAGRPID {group} is above ANAGRPMAX"
        );
    }
    Ok(())
}
