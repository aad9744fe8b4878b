//! The power is cut while states are kept: what was kept is there, and always there is a state.
//!
//! The disk below is a FUSE file that keeps what was not flushed in memory; a cut loses a random
//! part of that, sector by sector. `VNVME_CUTS` is how often the power is cut (200).

use fuse_disk::{Disk, Random};
use reservations::{HostId, Operation, ReservationFile, ReservationType, Reservations};
use std::fs;
use std::path::Path;
use std::time::Duration;

const NAMESPACE: [u8; 16] = [7; 16];
const SIZE: usize = 32 << 10;
const HOSTS: u64 = 6;
/// Upper bound of a wait, which only a hang reaches.
const BOUND: Duration = Duration::from_secs(20);

fn open(path: &Path, boot: u64) -> (ReservationFile, Reservations) {
    let mut id = [0xee; 16];
    id[..8].copy_from_slice(&boot.to_le_bytes());
    let opened = ReservationFile::open(path, NAMESPACE, id, Duration::ZERO);
    let (file, stored) = opened.expect("there is a state, whatever was written when");
    (file, stored.state)
}

/// Creates a random operation of a random host, which is valid in most cases.
fn operation(random: &mut Random, state: &Reservations) -> (HostId, Operation) {
    let host = HostId::short(1 + random.below(HOSTS));
    let own = |host: &HostId| {
        let mut registrants = state.registrants().iter();
        registrants.find(|one| one.host == *host).map(|one| one.key)
    };
    let key = own(&host).unwrap_or(0);
    let ptpl = match random.below(6) {
        0 => Some(false),
        1 | 2 => Some(true),
        _ => None,
    };
    let rtype = ReservationType::WriteExclusive;
    let victim = own(&HostId::short(1 + random.below(HOSTS))).unwrap_or(9);
    let new = 1 + random.below(1000);
    let operation = match random.below(12) {
        0..=4 if key == 0 => Operation::Register { key: new, ptpl },
        0..=4 => Operation::Replace {
            key: Some(key),
            new,
            ptpl,
        },
        5 | 6 => Operation::Acquire { key, rtype },
        7 => Operation::Preempt {
            key,
            victim,
            rtype,
            abort: true,
        },
        8 => Operation::Release { key, rtype },
        9 => Operation::Unregister {
            key: Some(key),
            ptpl,
        },
        10 if random.percent(20) => Operation::Clear { key },
        _ => Operation::Persist {
            ptpl: random.percent(70),
        },
    };
    (host, operation)
}

fn after_power_loss(state: &Reservations) -> Reservations {
    let mut left = state.clone();
    left.power_lost();
    left
}

#[test]
fn reservation_with_ptpl_survives_power_loss() {
    let said = std::env::var("VNVME_CUTS").ok();
    let cuts = said.map_or(200, |said| said.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let disk = match Disk::new(&dir.path().join("mount"), SIZE) {
        Ok(disk) => disk,
        Err(error) => {
            let what = "reservations::power::reservation_with_ptpl_survives_power_loss";
            return testkit::skip(what, format!("/dev/fuse: {error}"));
        }
    };
    // A disk of another kind cannot make files: one is put there, and is durable.
    let made = dir.path().join("made");
    drop(open(&made, 0));
    let file = fs::File::options().write(true).open(disk.path()).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &fs::read(&made).unwrap(), 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let mut random = Random::new(0x5eed);
    let mut kept = Reservations::new(true);
    // What was being kept when the power was cut.
    let mut maybe = None;
    let (mut saved, mut with_ptpl, mut newer, mut lost) = (0u64, 0u64, 0u64, 0);
    for boot in 1..=cuts {
        let (mut file, found) = open(&disk.path(), boot);
        let expected = after_power_loss(&kept);
        let other = maybe.take().map(|maybe| after_power_loss(&maybe));
        let is_newer = Some(&found) == other.as_ref();
        assert!(
            found == expected || is_newer,
            "cut {boot}: {found:?} is neither {expected:?} nor {other:?}"
        );
        newer += u64::from(is_newer && found != expected);
        with_ptpl += u64::from(found.ptpl() && !found.registrants().is_empty());
        kept = found;
        disk.cut_after(random.below(24), Random::new(random.number()));
        loop {
            let (host, operation) = operation(&mut random, &kept);
            let mut next = kept.clone();
            if next.execute(&host, &operation).is_err() || next == kept {
                continue;
            }
            match file.save(&next.clone().into()) {
                Ok(()) => {
                    kept = next;
                    saved += 1;
                }
                Err(_) => {
                    maybe = Some(next);
                    break;
                }
            }
        }
        lost += disk.wait_cut(BOUND).expect("it was cut").lost;
        drop(file);
        disk.power_on();
    }
    eprintln!(
        "{cuts} cuts: {saved} states kept, {newer} found that were being kept, {with_ptpl} times \
         registrants were there with PTPL, {lost} sectors lost"
    );
    assert!(with_ptpl > cuts / 10 && newer > 0 && lost > 0);
}
