//! Images from untrusted sources: each is refused with an error, or decodes to a valid state.

use nvme::Status;
use proptest::prelude::*;
use reservations::{
    Executed, HostId, Image, ImageError, MAX_EXECUTED, MAX_NOTICES, MAX_REGISTRANTS, Notification,
    NumberedNotice, Operation, ReservationType, Reservations,
};

fn image(registrants: u8, rtype: Option<ReservationType>) -> Image {
    let mut state = Reservations::new(true);
    for i in 0..registrants {
        let host = match i % 3 {
            0 => HostId::short(u64::from(i) + 1),
            _ => HostId::extended([i + 1; 16]),
        };
        let register = Operation::Register {
            key: u64::from(i) << 32,
            ptpl: Some(i.is_multiple_of(2)),
        };
        state.execute(&host, &register).unwrap();
    }
    if let Some(rtype) = rtype {
        let last = *state.registrants().last().unwrap();
        let acquire = Operation::Acquire {
            key: last.key,
            rtype,
        };
        state.execute(&last.host, &acquire).unwrap();
    }
    Image {
        sequence: 7,
        boot: [3; 16],
        namespace: [4; 16],
        state,
        executed: (0..registrants.min(2))
            .map(|i| Executed {
                token: [5 + i; 16],
                status: Status::RESERVATION_CONFLICT,
            })
            .collect(),
        notices: (1..=u64::from(registrants.min(2)))
            .map(|i| NumberedNotice {
                number: 3 * i,
                host: HostId::short(i),
                notification: Notification::RegistrationPreempted,
            })
            .collect(),
    }
}

/// Corrects the checksum after a change.
fn sum(bytes: &mut [u8]) {
    let end = bytes.len() - 4;
    let crc = crc32fast::hash(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn encoded_image_decodes() {
    for registrants in [0, 1, 2, 200] {
        for rtype in ReservationType::ALL.map(Some).into_iter().chain([None]) {
            if registrants == 0 && rtype.is_some() {
                continue;
            }
            let image = image(registrants, rtype);
            let mut bytes = image.encode();
            assert_eq!(Image::decode(&bytes), Ok(image.clone()));
            bytes.extend([0xee; 100]);
            assert_eq!(Image::decode(&bytes), Ok(image));
        }
    }
}

#[test]
fn every_flipped_bit_and_missing_byte_is_detected() {
    let bytes = image(3, Some(ReservationType::WriteExclusive)).encode();
    for bit in 0..bytes.len() * 8 {
        let mut bytes = bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(Image::decode(&bytes).is_err(), "bit {bit}");
    }
    for length in 0..bytes.len() {
        assert!(Image::decode(&bytes[..length]).is_err(), "{length} bytes");
    }
}

#[test]
fn contradicting_image_is_refused_with_reason() {
    use ImageError::Contradiction;
    let good = image(3, Some(ReservationType::WriteExclusive));
    let cases: &[(usize, &[u8], &str)] = &[
        (8, &[0], "there is no such version"),
        (44, &[7], "there is no such type"),
        (44, &[0], "somebody holds nothing"),
        (44, &[5], "the holder does not fit the type"),
        (45, &[0x82], "something is set that means nothing"),
        (46, &[2], "its length"),
        (48, &[3], "the holder is no registrant"),
        (48, &[0xff, 0xff], "the holder does not fit the type"),
        (45, &[2], "something is set that means nothing"),
        (50, &[1], "its length"),
        (52, &[1], "its length"),
        (54, &[1], "something is set that means nothing"),
        (8, &[1], "it has notices, which its version does not know"),
        (71, &[1], "something is set that means nothing"),
        (88 + 8, &[1], "a Host Identifier is too long"),
        (
            88 + 24,
            &[2],
            "something of a registrant is set that means nothing",
        ),
        (
            88 + 31,
            &[1],
            "something of a registrant is set that means nothing",
        ),
        (120, &[3; 16], "a host is registered twice"),
        (
            184 + 17,
            &[0x80],
            "something of an operation is set that means nothing",
        ),
        (
            184 + 23,
            &[1],
            "something of an operation is set that means nothing",
        ),
        (232 + 8, &[1], "a Host Identifier is too long"),
        (232 + 16, &[0], "notices are not in order"),
        (264 + 16, &[3], "notices are not in order"),
        (
            232 + 24,
            &[2],
            "something of a notice is set that means nothing",
        ),
        (232 + 25, &[4], "there is no such notice"),
        (
            232 + 31,
            &[1],
            "something of a notice is set that means nothing",
        ),
    ];
    for (at, change, why) in cases {
        let mut bytes = good.encode();
        bytes[*at..at + change.len()].copy_from_slice(change);
        sum(&mut bytes);
        assert_eq!(Image::decode(&bytes), Err(Contradiction(why)), "{at}");
    }
    // A reservation without registrants.
    let mut bytes = image(0, None).encode();
    bytes[44] = 6;
    sum(&mut bytes);
    let nobody = Contradiction("nobody holds the reservation");
    assert_eq!(Image::decode(&bytes), Err(nobody));
    // Of another version, magic, length.
    let mut bytes = good.encode();
    bytes[8] = 3;
    sum(&mut bytes);
    assert_eq!(Image::decode(&bytes), Err(ImageError::TooNew(3)));
    bytes[0] = b'v';
    assert_eq!(Image::decode(&bytes), Err(ImageError::Foreign));
    assert_eq!(Image::decode(&[0; 4096]), Err(ImageError::Empty));
    assert_eq!(Image::decode(&[]), Err(ImageError::Foreign));
    let mut bytes = good.encode();
    for length in [0, 3, 4, 87, 88, 91, u32::MAX] {
        bytes[12..16].copy_from_slice(&length.to_le_bytes());
        assert!(Image::decode(&bytes).is_err());
    }
}

#[test]
fn image_with_too_many_registrants_is_refused() {
    let mut state = Reservations::new(true);
    for i in 0..MAX_REGISTRANTS as u64 {
        let register = Operation::Register { key: i, ptpl: None };
        state.execute(&HostId::short(i), &register).unwrap();
    }
    let before = state.clone();
    let one_more = HostId::short(u64::MAX);
    for operation in [
        Operation::Register { key: 1, ptpl: None },
        Operation::Replace {
            key: None,
            new: 1,
            ptpl: None,
        },
    ] {
        let refused = state.execute(&one_more, &operation);
        assert_eq!(refused, Err(reservations::ReservationRefusal::Full));
        assert_eq!(state, before);
    }
    let mut image = image(0, None);
    image.state = state;
    assert_eq!(Image::decode(&image.encode()), Ok(image.clone()));
    // One more in the bytes.
    let mut bytes = image.encode();
    let length = bytes.len();
    bytes.splice(
        length - 4..length - 4,
        [0xff; 16]
            .into_iter()
            .chain([0; 8])
            .chain([1])
            .chain([0; 7]),
    );
    bytes[12..16].copy_from_slice(&(length as u32 + 32).to_le_bytes());
    bytes[46..48].copy_from_slice(&(MAX_REGISTRANTS as u16 + 1).to_le_bytes());
    sum(&mut bytes);
    let many = ImageError::Contradiction("there are too many registrants");
    assert_eq!(Image::decode(&bytes), Err(many));
    // Operations, too.
    let one = Executed {
        token: [1; 16],
        status: Status::SUCCESS,
    };
    image.executed = vec![one; MAX_EXECUTED];
    assert_eq!(Image::decode(&image.encode()), Ok(image.clone()));
    image.executed.push(one);
    let many = ImageError::Contradiction("there are too many operations");
    assert_eq!(Image::decode(&image.encode()), Err(many));
    image.executed.pop();
    // Notices, too.
    let notices = (1..=MAX_NOTICES as u64 + 1).map(|number| NumberedNotice {
        number,
        host: HostId::short(1),
        notification: Notification::ReservationReleased,
    });
    image.notices = notices.collect();
    let many = ImageError::Contradiction("there are too many notices");
    assert_eq!(Image::decode(&image.encode()), Err(many));
    image.notices.pop();
    assert_eq!(Image::decode(&image.encode()), Ok(image));
}

proptest! {
    #[test]
    fn changed_bytes_with_valid_checksum_decode_or_are_refused(
        registrants in 0_u8..4,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let rtype = (registrants > 0).then_some(ReservationType::ExclusiveAccess);
        let mut bytes = image(registrants, rtype).encode();
        for (at, value) in changes {
            let at = at.index(bytes.len() - 4);
            bytes[at] = value;
        }
        sum(&mut bytes);
        if let Ok(read) = Image::decode(&bytes) {
            prop_assert_eq!(read.encode(), bytes);
        }
    }
}

/// Version 1 has zeroes in place of the number of notices.
#[test]
fn image_of_version_without_notices_decodes() {
    let mut image = image(3, Some(ReservationType::WriteExclusive));
    image.notices.clear();
    let mut bytes = image.encode();
    bytes[8] = 1;
    sum(&mut bytes);
    assert_eq!(Image::decode(&bytes), Ok(image));
}
