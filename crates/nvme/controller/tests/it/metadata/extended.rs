//! Extended formats of protection information, which a host enables before it uses them: LBA Format
//! Extension Enable ("NVM Command Set 1.1", 4.1.3.6.1), offered by ELBAS.

use crate::common::*;
use crate::metadata::lasting::raw;
use crate::metadata::world::*;
use controller::{Attach, ControllerConfig, MetadataState, NamespaceConfig};
use nvme::feature::{Fid, HostBehavior};
use nvme::identify::{IdentifyController, NvmNamespace};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use protection::{Guard, Layout, StorageTag, Type};
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// Where the ranges of Dataset Management are.
const RANGES: u64 = METADATA + (1 << 19);
const DISABLED: Status = Status::INVALID_NAMESPACE_OR_FORMAT;

fn of_guard(block: u32, metadata: u16, guard: Guard, tag: u8) -> Layout {
    let layout = layout(block, metadata, Some((Type::One, guard, false)));
    stored(layout, StorageTag::of(tag))
}

/// Formats that have to be enabled.
fn extended() -> [Layout; 5] {
    let tagged = of_guard(4096, 64, Guard::Bits16, 32);
    [
        of_guard(512, 8, Guard::Bits16, 1),
        Layout {
            extended: true,
            ..tagged
        },
        of_guard(4096, 16, Guard::Bits32, 16),
        of_guard(4096, 16, Guard::Bits64, 0),
        of_guard(4096, 64, Guard::Bits64, 48),
    ]
}

/// Formats that need not be enabled.
fn usual_ones() -> [Layout; 4] {
    let bare = layout(4096, 16, None);
    [
        usual(),
        of_guard(4096, 64, Guard::Bits16, 0),
        bare,
        Layout {
            extended: true,
            ..bare
        },
    ]
}

/// The controller has been reset, and its host has said nothing of itself.
fn reset(p: &mut Protected) {
    p.h.disable();
    p.h.until(|h| !h.csts().rdy());
    p.h.enable();
    p.h.create_pair(1, 64);
}

fn without() -> HostBehavior {
    HostBehavior::default()
}

/// Every command that reads or changes blocks ends so.
fn each_ends(p: &mut Protected, wanted: Status, what: &str) {
    let deallocates = {
        p.h.write(
            RANGES,
            &[[0; 4], [1, 0, 0, 0], [5, 0, 0, 0], [0; 4]].concat(),
        );
        let mut command = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, p.nsid);
        command.set_prps(RANGES, 0);
        command.cdw11 = 4.into();
        command
    };
    p.fill(2, 5, 2);
    let mut commands: Vec<Command> = [
        NvmOpcode::WRITE,
        NvmOpcode::READ,
        NvmOpcode::COMPARE,
        NvmOpcode::VERIFY,
        NvmOpcode::WRITE_ZEROES,
    ]
    .into_iter()
    .map(|opcode| p.command(opcode, 5, 2, 0))
    .collect();
    commands.push(deallocates);
    let guard = p.layout.protection.map(|protection| protection.guard);
    let format = u32::from(guard.is_some_and(|guard| guard != Guard::Bits16));
    commands.push(p.copy(format, 40, [0, 0], &[from(5, 2)]));
    for command in commands {
        let status = p.h.io(command);
        let opcode = command.opcode;
        assert_eq!(plain(status), wanted, "{what}: {opcode:#x} {:?}", p.layout);
        assert_eq!(status.dnr(), !wanted.is_success(), "{opcode:#x}");
    }
    let flush = Command::new(NvmOpcode::FLUSH.0, 0, p.nsid);
    assert_eq!(p.h.io(flush), Status::SUCCESS, "{what}: {:?}", p.layout);
    let unknown = Command::new(NvmOpcode::WRITE_UNCORRECTABLE.0, 0, p.nsid);
    assert_eq!(plain(p.h.io(unknown)), Status::INVALID_OPCODE);
}

/// A host that has not enabled the format neither reads nor changes a block; one that has does, and
/// so does the next process for it. After a reset it is to be enabled again.
#[test]
fn disabled_extended_format_refuses_io() {
    for layout in extended() {
        let mut p = Protected::new(layout);
        let (data, _) = p.written(1, 5, 2);
        reset(&mut p);
        each_ends(&mut p, DISABLED, "after a reset");
        let mut below = vec![0; data.len()];
        raw(&p, 5, &mut below);
        assert!(below == data, "{layout:?}");
        assert_eq!(behaves(&mut p.h, &all_formats()), Status::SUCCESS);
        assert!(p.read(5, 2, GUARD).0 == data, "{layout:?}");
        each_ends(&mut p, Status::SUCCESS, "enabled");
        p.h.die();
        each_ends(&mut p, Status::SUCCESS, "the next process");
        assert_eq!(behaves(&mut p.h, &without()), Status::SUCCESS);
        each_ends(&mut p, DISABLED, "disabled");
        p.h.die();
        each_ends(&mut p, DISABLED, "the process after that");
    }
}

/// Hosts that know nothing of extended formats use all others, beside one that they cannot use,
/// too.
#[test]
fn usual_formats_work_without_lbafee() {
    for layout in usual_ones() {
        let mut p = Protected::new(layout);
        reset(&mut p);
        each_ends(&mut p, Status::SUCCESS, "alone");
        let plain_blocks = super::world::layout(512, 0, None);
        let others = [(extended()[3], 64), (plain_blocks, 64)];
        let mut p = Protected::beside(layout, &others);
        reset(&mut p);
        each_ends(&mut p, Status::SUCCESS, "beside another");
        let mut plain_read = p.h.rw(NvmOpcode::READ, 3, 0, 8, DATA);
        assert_eq!(p.h.io(plain_read), Status::SUCCESS);
        plain_read.nsid = 2.into();
        assert_eq!(plain(p.h.io(plain_read)), DISABLED);
        // All of them.
        let flush = Command::new(NvmOpcode::FLUSH.0, 0, u32::MAX);
        assert_eq!(p.h.io(flush), Status::SUCCESS);
    }
}

/// Blocks of a format that was not enabled are not copied to other namespaces either, whatever
/// their format.
#[test]
fn copy_from_disabled_format_is_refused() {
    let guard = of_guard(4096, 16, Guard::Bits64, 0);
    let bare = layout(4096, 0, None);
    let mut p = Protected::beside(guard, &[(bare, 64)]);
    (p.nsid, p.layout) = (2, bare);
    let cross = |lbafee| HostBehavior {
        cdfe: (1 << 3).into(),
        lbafee,
        ..HostBehavior::default()
    };
    for (lbafee, wanted) in [(0, DISABLED), (1, Status::SUCCESS), (0, DISABLED)] {
        assert_eq!(behaves(&mut p.h, &cross(lbafee)), Status::SUCCESS);
        let command = p.copy(3, 20, [PRACT, 0], &[from(5, 2)]);
        assert_eq!(p.copied(command), (wanted, 0), "{lbafee}");
    }
}

/// Format NVM erases nothing of a format that is not enabled, of one namespace or of all.
#[test]
fn format_of_disabled_extended_namespace_is_refused() {
    let mut p = Protected::new(of_guard(4096, 16, Guard::Bits64, 0));
    let both = p.written(1, 5, 2);
    let format = |nsid| {
        let mut command = Command::new(AdminOpcode::FORMAT_NVM.0, 0, nsid);
        command.cdw10 = (1 << 5).into();
        command
    };
    assert_eq!(behaves(&mut p.h, &without()), Status::SUCCESS);
    for nsid in [1, u32::MAX] {
        let status = p.h.admin(format(nsid)).status();
        assert_eq!((plain(status), status.dnr()), (DISABLED, true), "{nsid:#x}");
    }
    assert_eq!(behaves(&mut p.h, &all_formats()), Status::SUCCESS);
    assert!(p.read(5, 2, ALL) == both);
    assert_eq!(p.h.admin(format(1)).status(), Status::SUCCESS);
    assert!(p.read(5, 2, ALL) != both);
}

/// One that is attached later is used by a host that has enabled its format before it was there, as
/// long as that is so.
#[test]
fn attached_namespace_follows_lbafee() {
    let later = of_guard(4096, 16, Guard::Bits64, 0);
    for lbafee in [0, 1] {
        let mut p = Protected::beside(usual(), &[(layout(512, 0, None), 64)]);
        reset(&mut p);
        assert!(p.h.c.detach(2));
        let says = HostBehavior {
            lbafee,
            ..HostBehavior::default()
        };
        assert_eq!(behaves(&mut p.h, &says), Status::SUCCESS);
        let state = MetadataState::in_memory(later, 64).unwrap();
        let config = NamespaceConfig {
            metadata: Some(Arc::new(state)),
            ..ns(2, mem(64 * 4096), 4096)
        };
        p.h.c.attach(config, &p.h.io).unwrap();
        assert_eq!(p.h.c.attaching(), Attach::Done);
        (p.nsid, p.layout) = (2, later);
        let wanted = [DISABLED, Status::SUCCESS];
        each_ends(&mut p, wanted[usize::from(lbafee)], "later");
        assert_eq!(behaves(&mut p.h, &without()), Status::SUCCESS);
        each_ends(&mut p, DISABLED, "disabled");
    }
}

/// A controller that can have such namespaces says so, whether it has one or not, and takes LBAFEE;
/// another one refuses it.
#[test]
fn controller_reports_extended_format_support() {
    let workers = |workers| ControllerConfig {
        workers,
        ..ControllerConfig::default()
    };
    for (config, elbas) in [(workers(1), true), (workers(2), false)] {
        let mut h = Host::with(config, vec![ns(1, mem(1 << 20), 512)]);
        h.enable();
        let page = h.identify(1, 0, 0).1;
        let said = IdentifyController::read_from_bytes(&page).unwrap();
        assert_eq!(said.ctratt.elbas(), elbas);
        for lbafee in [2, 0x80, 0xff] {
            let says = HostBehavior {
                lbafee,
                ..HostBehavior::default()
            };
            assert_eq!(behaves(&mut h, &says), Status::INVALID_FIELD, "{lbafee}");
        }
        assert_eq!(behaves(&mut h, &without()), Status::SUCCESS);
        let wanted = if elbas {
            Status::SUCCESS
        } else {
            Status::INVALID_FIELD
        };
        assert_eq!(behaves(&mut h, &all_formats()), wanted);
        h.write(PAGE, &[0xff; 512]);
        h.get_feature(Fid::HOST_BEHAVIOR_SUPPORT, 0, 0);
        let known = HostBehavior {
            lbafee: u8::from(elbas),
            ..HostBehavior::default()
        };
        assert_eq!(h.read(PAGE, 512), known.as_bytes());
    }
}

/// Which format it is, a host finds before it enables it: guard and storage tag (ELBAF), and that
/// with a guard of 16 bits there may be one (PIC), always so where there are longer guards.
#[test]
fn extended_format_is_identified_before_enabling() {
    let said = [
        (1, 0, true),
        (32, 0, true),
        (16, 1, true),
        (0, 2, true),
        (48, 2, true),
    ];
    let usual = [(0, 0, false), (0, 0, false), (0, 0, false), (0, 0, false)];
    let all = extended().into_iter().chain(usual_ones());
    for (layout, (tag, format, tagged)) in all.zip(said.into_iter().chain(usual)) {
        let mut p = Protected::new(layout);
        for says in [without(), all_formats()] {
            assert_eq!(behaves(&mut p.h, &says), Status::SUCCESS);
            let (status, page) = p.h.identify(5, 1, 0);
            assert_eq!(status, Status::SUCCESS);
            let nvm = NvmNamespace::read_from_bytes(&page).unwrap();
            assert_eq!(nvm.elbaf[0].get(), tag | format << 7, "{layout:?}");
            assert_eq!(nvm.pic.pists16b(), tagged, "{layout:?}");
            assert_eq!(nvm.pic.into_bits() >> 3, 0, "no qualified formats");
        }
    }
}
