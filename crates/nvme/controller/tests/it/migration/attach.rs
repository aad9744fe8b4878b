//! Namespaces that come and go while the controller's queues are on several workers: no reset, no
//! command lost.

use crate::common::*;
use crate::migration::rules::migrate_to_others;
use crate::migration::world::{PAIRS, World};
use controller::{
    Attach, BlockFormat, FormatSaved, FormatStore, Formats, KeptFormat, NamespaceConfig,
    SavedFormat,
};
use nvme::aen::{AsyncEvent, Notice};
use nvme::cmd::io::CopyRange;
use nvme::feature::Fid;
use nvme::identify::IdentifyNamespace;
use nvme::log::Lid;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use volume::{Effect, Fault, Io, OpKind, Volume, VolumeError};
use zerocopy::{FromBytes, IntoBytes};

/// The NSIDs that the host finds.
fn listed(w: &mut World) -> Vec<u32> {
    let (status, page) = w.h.identify(2, 0, 0);
    assert_eq!(status, Status::SUCCESS);
    let nsids = page.chunks_exact(4);
    let nsids = nsids.map(|raw| u32::from_le_bytes(raw.try_into().unwrap()));
    nsids.take_while(|nsid| *nsid != 0).collect()
}

/// Parks a request for events, which the host wants of namespaces.
fn wait_for_event(w: &mut World) -> u16 {
    w.h.set_feature(Fid::ASYNC_EVENT_CONFIG, 1 << 8);
    let aer = Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0);
    let cid = w.h.submit(0, aer);
    w.h.run();
    assert!(w.h.reap(0).is_none(), "it waits");
    cid
}

/// The event has come; the namespaces that its log page names.
fn told(w: &mut World, cid: u16) -> Vec<u8> {
    w.h.run();
    let event = w.h.reap(0).expect("an event");
    assert_eq!(event.cid.get(), cid);
    let notice = Notice::NAMESPACE_ATTRIBUTE_CHANGED;
    let notice = AsyncEvent::notice(notice, Lid::CHANGED_NAMESPACE_LIST);
    assert_eq!(event.dw0.get(), notice.into_bits());
    let (status, list) = w.h.log(4, 4096, 0, false);
    assert_eq!(status, Status::SUCCESS);
    let nsids = list.chunks_exact(4).map(|raw| raw[0]);
    nsids.take_while(|nsid| *nsid != 0).collect()
}

/// Rounds of all workers, with what they do now and then.
fn rest(w: &mut World) {
    for _ in 0..4 {
        w.wake_all();
        w.h.run();
        let World { h, .. } = w;
        h.c.tidy(&h.io);
    }
}

fn write(w: &mut World, qid: u16, nsid: u32) -> Status {
    let command = w.h.rw(NvmOpcode::WRITE, nsid, u64::from(qid) * 8, 8, DATA);
    w.h.command(qid, command).status()
}

fn attach(w: &mut World, nsid: u32, volume: Arc<dyn Volume>) {
    let World { h, .. } = w;
    h.c.attach(ns(nsid, volume, 512), &h.io).unwrap();
}

#[test]
fn namespace_attaches_and_detaches_on_every_queue_without_reset() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.wake_all();
    for turn in 0..3u8 {
        let cid = wait_for_event(&mut w);
        let (volume, faults) = faulty(1 << 20);
        let volume: Arc<dyn Volume> = cached(volume);
        let left = Arc::downgrade(&volume);
        // No other worker drains its messages: the host is not shown what it could not use there.
        let beside = w.h.beside.take();
        attach(&mut w, 2, volume.clone());
        assert_eq!(w.h.c.attaching(), Attach::Under);
        assert_eq!(listed(&mut w), [1]);
        w.h.beside = beside;
        rest(&mut w);
        assert_eq!(w.h.c.attaching(), Attach::Done);
        assert_eq!(told(&mut w, cid), [2]);
        assert_eq!(listed(&mut w), [1, 2]);
        for qid in 1..=PAIRS {
            assert_eq!(write(&mut w, qid, 2), Status::SUCCESS, "{turn}: {qid}");
        }
        // A write is in flight in each queue when the namespace is detached.
        faults.add(Fault::always(OpKind::Write, Effect::Hold));
        let cid = wait_for_event(&mut w);
        for qid in 1..=PAIRS {
            let command = w.h.rw(NvmOpcode::WRITE, 2, 0, 8, DATA);
            w.h.submit(qid, command);
        }
        w.h.run_held(&faults, usize::from(PAIRS));
        assert!(w.h.c.detach(2) && !w.h.c.detach(2));
        rest(&mut w);
        assert_eq!(told(&mut w, cid), [2]);
        assert_eq!(listed(&mut w), [1]);
        assert!(!w.h.c.has_detached(), "writes are in flight");
        for qid in 1..=PAIRS {
            assert_eq!(write(&mut w, qid, 1), Status::SUCCESS, "the neighbour");
            let status = write(&mut w, qid, 2);
            assert_eq!(plain(status), Status::INVALID_FIELD, "{qid}");
        }
        faults.clear();
        faults.release();
        rest(&mut w);
        for qid in 1..=PAIRS {
            assert_eq!(w.h.reap(qid).expect("its end").status(), Status::SUCCESS);
        }
        rest(&mut w);
        assert!(w.h.c.has_detached());
        drop(volume);
        assert!(left.upgrade().is_none(), "{turn}: it is open still");
    }
    // Places are used again.
    assert_eq!(w.h.c.namespaces().count(), 1);
}

#[test]
fn commands_on_hanging_volume_end_early_on_request() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    let (volume, faults) = faulty(1 << 20);
    attach(&mut w, 3, volume);
    rest(&mut w);
    faults.add(Fault::always(OpKind::Write, Effect::Hold));
    for qid in 1..=PAIRS {
        let command = w.h.rw(NvmOpcode::WRITE, 3, 0, 8, DATA);
        w.h.submit(qid, command);
    }
    w.h.run_held(&faults, usize::from(PAIRS));
    w.h.c.detach(3);
    rest(&mut w);
    assert!(!w.h.c.has_detached());
    w.h.c.end_detached_early();
    rest(&mut w);
    for qid in 1..=PAIRS {
        assert!(!w.h.reap(qid).expect("its end").status().is_success());
    }
    rest(&mut w);
    assert!(w.h.c.has_detached());
}

#[test]
fn namespace_failing_on_one_worker_is_not_attached() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    let left = AtomicU32::new(2);
    let volume = opened(mem(1 << 20), move |volume, io| {
        match left.fetch_sub(1, Ordering::Relaxed) {
            0 => Err(VolumeError::BlockSize { block_size: 1 }),
            _ => volume.open(io),
        }
    });
    attach(&mut w, 2, volume);
    rest(&mut w);
    assert_eq!(w.h.c.attaching(), Attach::Refused);
    assert_eq!(listed(&mut w), [1]);
    rest(&mut w);
    assert!(w.h.c.has_detached());
    for qid in 1..=PAIRS {
        assert_eq!(plain(write(&mut w, qid, 2)), Status::INVALID_FIELD);
    }
    attach(&mut w, 2, mem(1 << 20));
    rest(&mut w);
    assert_eq!(w.h.c.attaching(), Attach::Done);
    for qid in 1..=PAIRS {
        assert_eq!(write(&mut w, qid, 2), Status::SUCCESS);
    }
}

#[test]
fn invalid_attach_changes_nothing() {
    let mut w = World::new(false);
    let World { h, .. } = &mut w;
    let mut refused = |nsid, block_size, volume| {
        let refused = h.c.attach(ns(nsid, volume, block_size), &h.io);
        refused.unwrap_err().to_string()
    };
    assert!(refused(1, 512, mem(1 << 20)).contains("twice"));
    assert!(refused(5, 512, mem(1 << 20)).contains("1 to 4"));
    assert!(refused(2, 4096, mem(512)).contains("does not divide"));
    assert_eq!(listed(&mut w), [1]);
    assert!(w.h.c.has_detached());
}

/// A remote engine that is made later has what the controller has then.
#[test]
fn later_worker_sees_all_namespaces() {
    let mut h = Host::with(
        crate::migration::world::config(false),
        vec![ns(1, mem(1 << 20), 512)],
    );
    let flag = crate::migration::other_worker::wake_flag(&Arc::default());
    h.c.set_worker(0, flag.clone().into());
    for nsid in [2, 3] {
        h.c.attach(ns(nsid, mem(1 << 20), 512), &h.io).unwrap();
    }
    assert!(h.c.detach(2));
    h.c.tidy(&h.io);
    assert!(h.c.has_detached());
    let setup = h.c.remote_engine(1, flag.into()).unwrap();
    let io = std::rc::Rc::new(Io::new(volume::IoOptions::default()));
    let mut engine = setup.open(10, &io).unwrap();
    h.c.attach(ns(2, mem(1 << 20), 512), &h.io).unwrap();
    assert_eq!(h.c.attaching(), Attach::Under);
    engine.drain_messages();
    assert_eq!(h.c.attaching(), Attach::Done);
    assert!(!engine.has_ended());
    drop(h);
    engine.drain_messages();
    assert!(engine.has_ended(), "its controller is gone");
}

/// Copies a block of namespace 2 to namespace 1.
fn copy_across(w: &mut World, qid: u16) -> Status {
    let range = CopyRange {
        snsid: 2.into(),
        ..CopyRange::default()
    };
    w.h.write(PAGE, range.as_bytes());
    let mut command = Command::new(NvmOpcode::COPY.0, 0, 1);
    command.set_prps(PAGE, 0);
    command.set_slba(qid.into());
    command.cdw12 = (2 << 8).into();
    plain(w.h.command(qid, command).status())
}

/// The formats of Copy's descriptors, for one: whether it is said before a worker has a queue, or
/// after that.
#[test]
fn host_behavior_reaches_every_worker() {
    for said_first in [true, false] {
        let mut w = World::new(false);
        attach(&mut w, 2, mem(1 << 20));
        rest(&mut w);
        let say = |w: &mut World| {
            for qid in 1..=PAIRS {
                assert_eq!(copy_across(w, qid), Status::INVALID_FIELD);
            }
            let mut behavior = [0; 512];
            behavior[4] = 1 << 2;
            w.h.write(PAGE, &behavior);
            let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
            command.cdw10 = u32::from(Fid::HOST_BEHAVIOR_SUPPORT.0).into();
            command.set_prps(PAGE, 0);
            assert_eq!(w.h.admin(command).status(), Status::SUCCESS);
        };
        if said_first {
            say(&mut w);
        }
        migrate_to_others(&mut w);
        w.wake_all();
        if !said_first {
            say(&mut w);
        }
        rest(&mut w);
        for qid in 1..=PAIRS {
            assert_eq!(
                copy_across(&mut w, qid),
                Status::SUCCESS,
                "{said_first} {qid}"
            );
        }
    }
}

/// Keeps nothing, and says so when the test wants.
#[derive(Default)]
struct Keeps(Mutex<Option<FormatSaved>>);

impl std::fmt::Debug for Keeps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeps").finish_non_exhaustive()
    }
}

impl FormatStore for Keeps {
    fn save(&self, _: BlockFormat, done: FormatSaved) {
        *self.0.lock().unwrap() = Some(done);
    }
}

/// When the host knows of the new blocks, every worker does, and what was in flight is over.
#[test]
fn format_takes_effect_on_every_queue() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    let (volume, faults) = faulty(1 << 20);
    let keeps = Arc::<Keeps>::default();
    let config = NamespaceConfig {
        formats: Some(Formats::new(512, keeps.clone())),
        ..ns(2, cached(volume), 512)
    };
    let World { h, .. } = &mut w;
    h.c.attach(config, &h.io).unwrap();
    rest(&mut w);
    for (lbaf, blocks) in [(1, 256), (0, 2048), (1, 256)] {
        // In each queue a write is in flight.
        faults.add(Fault::always(OpKind::Write, Effect::Hold));
        for qid in 1..=PAIRS {
            let command = w.h.rw(NvmOpcode::WRITE, 2, u64::from(qid), 1, DATA);
            w.h.submit(qid, command);
        }
        w.h.run_held(&faults, usize::from(PAIRS));
        let mut command = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 2);
        command.cdw10 = lbaf.into();
        w.h.submit(0, command);
        rest(&mut w);
        assert!(keeps.0.lock().unwrap().is_none(), "they are in flight");
        faults.clear();
        faults.release();
        let mut done = None;
        while done.is_none() {
            w.wake_all();
            w.h.round();
            done = keeps.0.lock().unwrap().take();
        }
        // The other workers come later.
        let beside = w.h.beside.take();
        done.unwrap()(SavedFormat::New(KeptFormat { metadata: None }));
        for _ in 0..100 {
            w.h.round();
        }
        assert_eq!(block_size(&mut w), (1 << 20) / blocks);
        assert!(w.h.reap(0).is_none(), "not every worker knows");
        w.h.beside = beside;
        rest(&mut w);
        let done = w.h.reap(0).expect("its end");
        assert_eq!(done.status(), Status::SUCCESS);
        for qid in 1..=PAIRS {
            assert_eq!(w.h.reap(qid).expect("its end").status(), Status::SUCCESS);
        }
        for qid in 1..=PAIRS {
            for (slba, expected) in [
                (blocks - 1, Status::SUCCESS),
                (blocks, Status::LBA_OUT_OF_RANGE),
            ] {
                let command = w.h.rw(NvmOpcode::WRITE, 2, slba, 1, DATA);
                let status = w.h.command(qid, command).status();
                assert_eq!(plain(status), expected, "{qid} {slba}");
            }
        }
    }
}

fn block_size(w: &mut World) -> u64 {
    let (_, page) = w.h.identify(0, 2, 0);
    let ns = IdentifyNamespace::read_from_bytes(&page).unwrap();
    ns.formatted().unwrap().block_size().unwrap().into()
}
