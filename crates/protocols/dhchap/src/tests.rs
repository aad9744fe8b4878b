//! Tests of both sides against each other, against vectors that another implementation has made
//! (Python's `hmac` and `pow`), and against sides that cheat.

use crate::group::Group;
use crate::hash::Hash;
use crate::message::{Challenge, Failure, MAX_MESSAGE_LEN, Reply};
use crate::random::{CHALLENGE, EXPONENT};
use crate::{AuthFailure, AuthStatus, Controller, Host, Names, Random, Secret, Secrets};
use proptest::collection::vec;
use proptest::prelude::*;

const HOST: &str = "AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:";
const CONTROLLER: &str =
    "ZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXp7fH1+f4CBgoOEhYaHiImKi4yNjo+QkZKTvGwQfg==:";

fn names() -> Names {
    Names {
        host: "nqn.2014-08.org.vnvme:a-host".into(),
        subsystem: "nqn.2014-08.org.vnvme:a-subsystem".into(),
    }
}

fn secret(transform: u8, rest: &str) -> Secret {
    Secret::parse(&format!("DHHC-1:{transform:02}:{rest}")).unwrap()
}

fn secrets(host: u8, controller: Option<u8>) -> Secrets {
    Secrets {
        host: secret(host, HOST),
        controller: controller.map(|transform| secret(transform, CONTROLLER)),
    }
}

/// Numbers that count from `first` on.
fn random(first: u8, exponent: u8, sequence: u32) -> Random {
    Random {
        challenge: std::array::from_fn::<u8, CHALLENGE, _>(|i| first + i as u8),
        exponent: [exponent; EXPONENT],
        sequence,
        transaction: 0x1234,
    }
}

fn host(secrets: Secrets) -> Host {
    Host::new(names(), secrets, random(128, 0x22, 0x0a0b_0c0d))
}

fn controller(secrets: Secrets) -> Controller {
    Controller::new(names(), secrets, random(0, 0x11, 0x0102_0304))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Passes messages from one side to the other; returns the result of each side.
fn run(host: &mut Host, controller: &mut Controller) -> (Result<(), AuthFailure>, AuthStatus) {
    let step = controller.take(&host.negotiate());
    if step != AuthStatus::Next {
        let told = host.reply(&controller.answer().message);
        return (told.map(drop), step);
    }
    let reply = match host.reply(&controller.answer().message) {
        Ok(reply) => reply,
        Err(why) => return tell(why, controller),
    };
    controller.take(&reply);
    let answer = controller.answer();
    match host.conclude(&answer.message) {
        Ok(None) => (Ok(()), answer.step),
        Ok(Some(success)) => (Ok(()), controller.take(&success)),
        Err(why) => tell(why, controller),
    }
}

/// The host ends the transaction, and reports the reason.
fn tell(why: AuthFailure, controller: &mut Controller) -> (Result<(), AuthFailure>, AuthStatus) {
    let step = match &why {
        AuthFailure::ByHost { message, .. } => controller.take(message),
        AuthFailure::ByController(failure) => AuthStatus::Failed(*failure),
    };
    (Err(why), step)
}

const VECTORS: [(Hash, Group, u8, u8, &str, &str); 3] = [
    (
        Hash::Sha256,
        Group::Null,
        0,
        0,
        "09024c7feee78232a7a3f398246abeb4acc648da2385dcfe78e74401abe9340b",
        "a816107eb26b7eadd6cc977fad00cb78c7bff9bc12a129a1bc8bdf21c64f55b6",
    ),
    (
        Hash::Sha384,
        Group::Ffdhe2048,
        1,
        2,
        "ac96b042709a9514b58145a3ee94c6bacf427eed0684ca81e3a2952116929afe23f532a1b4a00cfa187d7d01\
         518d93fd",
        "4eb7c703d99c11793f3ddca551c82db8f0d098b0790caf9ef1683aa6567a59afeb8e7c4c5d7255646fa724d4\
         2a6ff4f6",
    ),
    (
        Hash::Sha512,
        Group::Ffdhe3072,
        3,
        1,
        "4cf714e3c89b4fc615f5a3a3afbefef66f3a5b75d38242836365b1372ffac1c64032d515d3e6b27982a9868b\
         1405aef90c74590498784a6bbad20d4c8bf66171",
        "7c4791f89aa04d04d21c0fc616877b25465acd1efaee6b758df20160c684c1982059e9aaa83bcd82e825c9fe\
         a1f1a704195104783db5d04d1191c89b2a70b3c1",
    ),
];

#[test]
fn responses_match_other_implementation() {
    for (hash, group, of_host, of_controller, r1, r2) in VECTORS {
        let mut host = host(secrets(of_host, Some(of_controller)));
        let of_x = random(0, 0x11, 1);
        let public = group.public(&of_x.exponent);
        let challenge = Challenge {
            hash: hash.id(),
            group: group.id(),
            sequence: 0x0102_0304,
            challenge: &of_x.challenge[..hash.len()],
            public: &public,
        };
        let reply = host.reply(&challenge.message(0x1234)).unwrap();
        let reply = Reply::parse(&reply, 0x1234, hash).unwrap();
        assert_eq!(hex(reply.response), r1, "{hash:?} {group:?}");
        assert_eq!(reply.challenge.unwrap()[0], 128);
        let bytes: Vec<u8> = (0..r2.len() / 2)
            .map(|at| u8::from_str_radix(&r2[at * 2..at * 2 + 2], 16).unwrap())
            .collect();
        let success = crate::message::success1(0x1234, hash, Some(&bytes));
        let said = host.conclude(&success).unwrap().unwrap();
        assert_eq!(hex(&said), "01040000341200000000000000000000");
    }
}

/// The layout is that of Linux's `struct nvmf_auth_dhchap_negotiate_data` and its further messages.
#[test]
fn messages_match_linux_layout() {
    let host = host(secrets(0, None));
    let first = host.negotiate();
    assert_eq!(first.len(), 8 + 64);
    assert_eq!(hex(&first[..15]), "000000003412000101000306030201");
    assert_eq!(hex(&first[12 + 30..12 + 36]), "010203040500");
    let mut controller = controller(secrets(0, None)).with_groups(&[Group::Null]);
    assert_eq!(controller.take(&first), AuthStatus::Next);
    let challenge = controller.answer().message;
    assert_eq!(
        hex(&challenge[..20]),
        "0101000034124000030000000403020100010203"
    );
    assert_eq!(challenge.len(), 16 + 64);
}

#[test]
fn host_and_controller_authenticate_each_other() {
    for groups in [&[Group::Null][..], &[Group::Ffdhe2048], &[Group::Ffdhe8192]] {
        let groups: &'static [Group] = Box::leak(groups.to_vec().into_boxed_slice());
        for asks in [None, Some(0), Some(3)] {
            let mut host = host(secrets(1, asks));
            let mut controller =
                controller(secrets(1, Some(asks.unwrap_or(2)))).with_groups(groups);
            assert!(!controller.is_slow());
            let came_to = run(&mut host, &mut controller);
            assert_eq!(came_to, (Ok(()), AuthStatus::Authenticated), "{groups:?}");
            assert!(controller.is_authenticated());
        }
    }
    assert!(MAX_MESSAGE_LEN >= 16 + 2 * 64 + Group::Ffdhe8192.len());
}

#[test]
fn slow_steps_are_reported_before_computation() {
    let mut host = host(secrets(1, None));
    let mut controller = controller(secrets(1, None));
    controller.take(&host.negotiate());
    assert!(controller.is_slow());
    let challenge = controller.answer();
    assert!(controller.is_slow());
    controller.take(&host.reply(&challenge.message).unwrap());
    assert!(!controller.is_slow());
}

fn refused(why: Failure) -> impl Fn(&Result<(), AuthFailure>) -> bool {
    move |result| match result {
        Err(AuthFailure::ByController(found)) => *found == why,
        Err(AuthFailure::ByHost { why: found, .. }) => *found == why,
        Ok(()) => false,
    }
}

#[test]
fn wrong_secret_is_detected_by_either_side() {
    // The host's is another one, or is transformed otherwise.
    for wrong in [secret(0, CONTROLLER), secret(2, HOST)] {
        let mut cheat = host(Secrets {
            host: wrong,
            controller: None,
        });
        let mut controller = controller(secrets(1, None));
        let (told, step) = run(&mut cheat, &mut controller);
        assert!(refused(Failure::FAILED)(&told), "{told:?}");
        assert_eq!(step, AuthStatus::Failed(Failure::FAILED));
        assert!(!controller.is_authenticated());
    }
    // The controller's.
    let mut host = host(secrets(1, Some(0)));
    let mut cheat = controller(Secrets {
        host: secret(1, HOST),
        controller: Some(secret(1, CONTROLLER)),
    });
    let (told, step) = run(&mut host, &mut cheat);
    assert!(refused(Failure::FAILED)(&told), "{told:?}");
    assert_eq!(step, AuthStatus::Failed(Failure::FAILED));
    assert!(!cheat.is_authenticated(), "the host has not taken it");
}

#[test]
fn host_refuses_controller_without_response() {
    let mut host = host(secrets(1, Some(0)));
    let mut controller = controller(secrets(1, Some(0)));
    controller.take(&host.negotiate());
    let reply = host.reply(&controller.answer().message).unwrap();
    assert_eq!(controller.take(&reply), AuthStatus::Next);
    let without = crate::message::success1(0x1234, Hash::Sha512, None);
    let told = host.conclude(&without).map(drop);
    assert!(refused(Failure::FAILED)(&told), "{told:?}");
}

#[test]
fn controller_without_secret_ends_authentication() {
    let (mut host, mut controller) = (host(secrets(1, Some(0))), controller(secrets(1, None)));
    let (told, _) = run(&mut host, &mut controller);
    assert!(refused(Failure::FAILED)(&told), "{told:?}");
}

/// A reply to one controller, or in another transaction, is rejected elsewhere.
#[test]
fn replayed_reply_is_rejected() {
    let mut host = host(secrets(1, None));
    let mut first = controller(secrets(1, None)).with_groups(&[Group::Null]);
    first.take(&host.negotiate());
    let reply = host.reply(&first.answer().message).unwrap();
    let mut other = Controller::new(names(), secrets(1, None), random(1, 0x11, 0x0102_0304));
    other = other.with_groups(&[Group::Null]);
    other.take(&host.negotiate());
    other.answer();
    assert_eq!(other.take(&reply), AuthStatus::Failed(Failure::FAILED));
    // The reply's own transaction accepts it once.
    assert_eq!(first.take(&reply), AuthStatus::Next);
    assert_eq!(first.answer().step, AuthStatus::Authenticated);
    assert_eq!(first.take(&reply), AuthStatus::Failed(Failure::ORDER));
    assert!(!first.is_authenticated());
}

/// A controller's challenge, sent back to it as a host's, is not answered.
#[test]
fn reflected_challenge_is_refused() {
    let secrets = Secrets {
        host: secret(0, HOST),
        controller: Some(secret(0, HOST)),
    };
    let mut cheat = Host::new(names(), secrets.clone(), random(0, 0x22, 7));
    let mut controller = controller(secrets).with_groups(&[Group::Null]);
    let (told, _) = run(&mut cheat, &mut controller);
    assert!(refused(Failure::PAYLOAD)(&told), "{told:?}");
}

#[test]
fn messages_out_of_order_end_authentication() {
    let controllers = || controller(secrets(1, Some(1))).with_groups(&[Group::Null]);
    let mut host = host(secrets(1, Some(1)));
    let mut controller = controllers();
    let first = host.negotiate();
    controller.take(&first);
    let reply = host.reply(&controller.answer().message).unwrap();
    controller.take(&reply);
    let success = host
        .conclude(&controller.answer().message)
        .unwrap()
        .unwrap();
    // A success that nobody has asked for is none.
    for wrong in [&reply, &success] {
        assert_eq!(
            controllers().take(wrong),
            AuthStatus::Failed(Failure::ORDER)
        );
    }
    let mut early = controllers();
    assert_eq!(early.answer().step, AuthStatus::Failed(Failure::ORDER));
    let mut early = controllers();
    early.take(&first);
    assert_eq!(early.take(&reply), AuthStatus::Failed(Failure::ORDER));
    let mut early = controllers();
    early.take(&first);
    early.answer();
    assert_eq!(early.take(&success), AuthStatus::Failed(Failure::ORDER));
    assert_eq!(
        early.take(&first),
        AuthStatus::Failed(Failure::ORDER),
        "once failed"
    );
    let mut twice = controllers();
    twice.take(&first);
    twice.answer();
    assert_eq!(twice.answer().step, AuthStatus::Failed(Failure::ORDER));
    // The host's side.
    let mut early = self::host(secrets(1, None));
    let success = crate::message::success1(0x1234, Hash::Sha512, None);
    assert!(refused(Failure::ORDER)(&early.conclude(&success).map(drop)));
    assert!(refused(Failure::ORDER)(&early.reply(&success).map(drop)));
}

#[test]
fn offers_without_common_algorithm_are_refused() {
    let first = host(secrets(0, None)).negotiate();
    let changed = |at: usize, bytes: &[u8]| {
        let mut message = first.clone();
        message[at..at + bytes.len()].copy_from_slice(bytes);
        controller(secrets(0, None)).take(&message)
    };
    for (at, bytes, why) in [
        (6, &[1][..], Failure::CONCATENATION),
        (7, &[0], Failure::PAYLOAD),
        (7, &[2], Failure::PAYLOAD),
        (8, &[2], Failure::PROTOCOL),
        (10, &[0], Failure::HASH),
        (10, &[31], Failure::PAYLOAD),
        (11, &[31], Failure::PAYLOAD),
        (11, &[0], Failure::GROUP),
        (12, &[9, 9, 9], Failure::HASH),
        (42, &[9; 6], Failure::GROUP),
    ] {
        assert_eq!(
            changed(at, bytes),
            AuthStatus::Failed(why),
            "at {at}: {bytes:?}"
        );
    }
}

proptest! {
    /// Neither side accepts a changed message, and none panics. Reserved bytes are ignored.
    #[test]
    fn changed_messages_never_authenticate(
        which in 0..4usize,
        at in any::<prop::sample::Index>(),
        by in 1..=255u8,
    ) {
        let mut host = host(secrets(1, Some(2)));
        let mut controller = controller(secrets(1, Some(2))).with_groups(&[Group::Null]);
        let change = |number: usize, mut message: Vec<u8>| {
            if number == which {
                let place = at.index(message.len());
                message[place] ^= by;
            }
            message
        };
        let offers = change(0, host.negotiate());
        controller.take(&offers);
        let challenge = change(1, controller.answer().message);
        if let Ok(reply) = host.reply(&challenge) {
            let reply = change(2, reply);
            controller.take(&reply);
            let success = change(3, controller.answer().message);
            let ended = host.conclude(&success);
            if let Ok(Some(last)) = ended {
                let step = controller.take(&last);
                // The change was to reserved bytes, or only to further offers.
                let kept = Controller::is_authenticated(&controller);
                prop_assert_eq!(step == AuthStatus::Authenticated, kept);
                let silent = match which {
                    0 => true,
                    1 => at.index(80) == 2 || at.index(80) == 3 || at.index(80) == 7,
                    2 => {
                        let place = at.index(144);
                        matches!(place, 2 | 3 | 7 | 9) || (place == 8 && by & 1 == 0)
                    }
                    _ => {
                        let place = at.index(80);
                        matches!(place, 2 | 3 | 7 | 9..=15) || (place == 8 && by & 1 == 0)
                    }
                };
                prop_assert!(silent, "message {which}");
            }
        }
    }

    #[test]
    fn random_messages_cause_no_panic(
        messages in vec((any::<bool>(), vec(any::<u8>(), 0..200)), 0..6),
        real in any::<bool>(),
    ) {
        let mut host = host(secrets(1, Some(2)));
        let mut controller = controller(secrets(1, Some(2)));
        if real {
            controller.take(&host.negotiate());
        }
        for (asks, message) in messages {
            if asks {
                let _ = controller.answer();
            }
            controller.take(&message);
            prop_assert!(!controller.is_authenticated());
            let _ = host.reply(&message);
            let _ = host.conclude(&message);
        }
    }
}

#[test]
fn debug_output_has_no_secret() {
    let shown = format!(
        "{:?} {:?} {:?} {:?}",
        host(secrets(1, Some(2))),
        controller(secrets(1, None)),
        secrets(1, Some(2)),
        random(0, 0, 1)
    );
    assert!(!shown.contains("AQID") && !shown.contains('['), "{shown}");
}
