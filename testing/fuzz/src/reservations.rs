//! Foreign reservation files, and reservation commands with any fields.

use nvme::cmd::reservation::{
    AcquireCdw10, AcquireData, RegisterCdw10, RegisterData, ReleaseCdw10, ReleaseData,
};
use reservations::{CommandGroup, HostId, Image, MAX_REGISTRANTS, Operation, Reservations};

/// Minimum length of an image, without its checksum.
const MIN_IMAGE_LEN: usize = 88;

/// Takes the input as an image, as it is and with a right checksum; then, on the state that it is
/// (or one without registrants), as reservation commands of four hosts.
///
/// # Panics
/// When a state is none that there can be.
pub fn reservations(data: &[u8]) {
    let Some((&first, rest)) = data.split_first() else {
        return;
    };
    let _ = Image::decode(rest);
    let half = match first & 1 {
        0 => 0,
        _ => rest.len() / 2,
    };
    let (image, commands) = rest.split_at(half);
    let mut state =
        image_of(image).map_or_else(|| Reservations::new(first & 2 != 0), |image| image.state);
    for command in commands.chunks_exact(8) {
        let [kind, host, a, b, c, key, other, more] = *command else {
            return;
        };
        let host = match host % 4 {
            0 => HostId::short(host.into()),
            n => HostId::extended([n; 16]),
        };
        let cdw10 = u32::from_le_bytes([a, b, 0, c]);
        let (key, other) = (u64::from(key % 4), u64::from(other % 4));
        let operation = match kind % 4 {
            0 => {
                let data = RegisterData {
                    crkey: key.into(),
                    nrkey: other.into(),
                };
                Operation::register(RegisterCdw10::from_bits(cdw10), &data)
            }
            1 => {
                let data = AcquireData {
                    crkey: key.into(),
                    prkey: other.into(),
                };
                Operation::acquire(AcquireCdw10::from_bits(cdw10), &data)
            }
            2 => {
                let data = ReleaseData { crkey: key.into() };
                Operation::release(ReleaseCdw10::from_bits(cdw10), &data)
            }
            _ => Ok(Operation::Persist {
                ptpl: more & 1 != 0,
            }),
        };
        let Ok(operation) = operation else {
            continue;
        };
        let before = state.clone();
        let result = state.execute(&host, &operation);
        if result.is_err() {
            assert_eq!(state, before);
        }
        if more & 0x80 != 0 {
            state.power_lost();
        }
        check(&state);
    }
}

/// The input as an image: as it is, or with length and checksum made right.
fn image_of(bytes: &[u8]) -> Option<Image> {
    if let Ok(image) = Image::decode(bytes) {
        return Some(image);
    }
    if bytes.len() < MIN_IMAGE_LEN {
        return None;
    }
    let mut bytes = bytes.to_vec();
    bytes.get_mut(..8)?.copy_from_slice(b"VNVMERSV");
    bytes.get_mut(8..12)?.copy_from_slice(&1_u32.to_le_bytes());
    let length = bytes.len() as u32 + 4;
    bytes
        .get_mut(12..16)?
        .copy_from_slice(&length.to_le_bytes());
    let crc = crc32fast::hash(&bytes);
    bytes.extend(crc.to_le_bytes());
    let image = Image::decode(&bytes).ok()?;
    assert_eq!(image.encode(), bytes);
    Some(image)
}

/// Checks the invariants of a state.
fn check(state: &Reservations) {
    let registrants = state.registrants();
    assert!(registrants.len() <= MAX_REGISTRANTS);
    for (i, one) in registrants.iter().enumerate() {
        assert!(
            registrants
                .iter()
                .skip(i + 1)
                .all(|other| other.host != one.host)
        );
    }
    let report = state.report(true, |_| None);
    assert_eq!(report.len(), 64 + 64 * registrants.len());
    let Some(held) = state.reservation() else {
        assert!(
            state
                .access(&HostId::short(u64::MAX))
                .allows(CommandGroup::Write)
        );
        return;
    };
    assert_eq!(held.holder.is_none(), held.rtype.held_by_all());
    let mut holders = registrants.iter().filter(|one| state.is_holder(&one.host));
    assert!(holders.all(|one| state.access(&one.host) == reservations::Access::FULL));
    assert!(registrants.iter().any(|one| state.is_holder(&one.host)));
    if let Some(holder) = held.holder {
        assert!(state.is_registrant(&holder));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;

    #[test]
    fn random_scripts_cause_no_panic() {
        let mut chance = Chance::new();
        for _ in 0..20_000 {
            reservations(&chance.script(512, |first| *first |= 2));
        }
    }
}
