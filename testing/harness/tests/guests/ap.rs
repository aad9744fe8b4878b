//! AP queues in an s390x guest: an unmodified Debian kernel under QEMU's TCG with the plugin
//! `ap-plugin`. The guest finds cards and queues, turns interrupts on by AQIC, and does RSA by its
//! zcrypt driver; OpenSSL says what is right.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use harness::daemon::built;
use harness::progress::skip;
use harness::s390x::{Mainframe, Options};
use harness::{Cache, Guest, cache::checkout};

use crate::common::Checks;

/// Queues that the plugin is told to make: cards 0 and 3, domains 6 and 71.
const ARGUMENTS: &str =
    "adapter=0,adapter=3,domain=6,domain=71,control-domain=6,control-domain=200";
const QUEUES: [&str; 4] = ["00.0006", "00.0047", "03.0006", "03.0047"];

/// Builds the plugin, unless it lies in the directory `VNVME_PROGRAMS`.
fn plugin() -> Result<PathBuf> {
    if let Some(built) = built("libap_plugin.so") {
        return Ok(built);
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(checkout()).args([
        "build",
        "-p",
        "ap-plugin",
        "--message-format=json-render-diagnostics",
    ]);
    let out = command.stderr(Stdio::inherit()).output()?;
    ensure!(out.status.success(), "cargo build of ap-plugin failed");
    String::from_utf8_lossy(&out.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == "ap_plugin")
        .find_map(|message| Some(PathBuf::from(message["filenames"][0].as_str()?)))
        .context("cargo build named no library")
}

/// What this machine has of an s390x guest; says that the test is skipped, and why, if it has not.
fn mainframe(test: &str, cache: &Cache) -> Option<Mainframe> {
    match Mainframe::fetch(cache) {
        Ok(mainframe) => Some(mainframe),
        Err(e) => {
            skip(test, format!("no s390x guest on this machine: {e:#}"));
            None
        }
    }
}

/// A line for `icarsa`, and what it must print.
struct Request {
    line: String,
    result: String,
}

/// Requests with a new key of `bits`: the public operation, and the private one with
/// exponent and with primes.
fn requests(mainframe: &Mainframe, bits: u32, dir: &Path) -> Result<Vec<Request>> {
    let path = |name: &str| dir.join(name).display().to_string();
    let (key, input) = (path("key.pem"), path("input"));
    mainframe.openssl(&["genrsa", "-traditional", "-out", &key, &bits.to_string()])?;
    let text = mainframe.openssl(&["rsa", "-in", &key, "-noout", "-text"])?;
    let text = String::from_utf8(text)?;
    mainframe.openssl(&["rand", "-out", &input, &(bits / 8).to_string()])?;
    let mut message = std::fs::read(&input)?;
    // Below the modulus for certain.
    if let Some(first) = message.first_mut() {
        *first = 0;
    }
    std::fs::write(&input, &message)?;
    let operation = |which: &str| -> Result<String> {
        let padding = "rsa_padding_mode:none";
        let result = mainframe.openssl(&[
            "pkeyutl", which, "-inkey", &key, "-in", &input, "-pkeyopt", padding,
        ])?;
        Ok(hex(&result))
    };
    let (public, private) = (operation("-encrypt")?, operation("-decrypt")?);
    let number = |name: &str| {
        number(&text, name).with_context(|| format!("openssl names no {name} for {bits} bits"))
    };
    let (n, d) = (number("modulus")?, number("privateExponent")?);
    let (p, q) = (number("prime1")?, number("prime2")?);
    let (dp, dq) = (number("exponent1")?, number("exponent2")?);
    let u = number("coefficient")?;
    let message = hex(&message);
    Ok(vec![
        Request {
            line: format!("me {message} 010001 {n}"),
            result: public,
        },
        Request {
            line: format!("me {message} {d} {n}"),
            result: private.clone(),
        },
        Request {
            line: format!("crt {message} {p} {q} {dp} {dq} {u}"),
            result: private,
        },
    ])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A number of `openssl rsa -text`: its name, then indented lines of bytes with
/// colons. Without leading zeros.
fn number(text: &str, name: &str) -> Option<String> {
    let lines = text
        .lines()
        .skip_while(|line| *line != format!("{name}:"))
        .skip(1);
    let digits: String = lines
        .take_while(|line| line.starts_with(' '))
        .flat_map(str::chars)
        .filter(char::is_ascii_hexdigit)
        .collect();
    let digits = digits.trim_start_matches('0');
    let even = if digits.len().is_multiple_of(2) {
        ""
    } else {
        "0"
    };
    (!digits.is_empty()).then(|| format!("{even}{digits}"))
}

/// Has the guest work requests off, and compares.
fn work(guest: &Guest, requests: &[Request]) -> Result<()> {
    let lines: String = requests.iter().map(|r| format!("{}\n", r.line)).collect();
    guest.push_file("/tmp/requests", 0o644, lines.as_bytes())?;
    let out = guest.run("icarsa </tmp/requests")?;
    compare(&out, requests)
}

fn compare(out: &str, requests: &[Request]) -> Result<()> {
    let results: Vec<&str> = out.lines().collect();
    ensure!(
        results.len() == requests.len(),
        "{} results: {out}",
        results.len()
    );
    for (result, request) in results.iter().zip(requests) {
        let same = *result == request.result;
        ensure!(
            same,
            "{}\n  gave {result}\n  OpenSSL {}",
            request.line,
            request.result
        );
    }
    Ok(())
}

/// The facilities that concern AP, as the guest's kernel has them.
fn facilities(guest: &Guest, want: &[&str]) -> Result<()> {
    let out = guest.run("grep -m 1 facilities /proc/cpuinfo")?;
    let words: Vec<&str> = out.split_whitespace().collect();
    let has: Vec<&str> = ["12", "15", "65"]
        .into_iter()
        .filter(|bit| words.contains(bit))
        .collect();
    ensure!(has == want, "{out}");
    Ok(())
}

/// Cards and queues as lszcrypt reads them.
fn seen(guest: &Guest) -> Result<()> {
    let out = guest.run(
        "cd /sys/devices/ap; for c in card*; do echo $c $(cat $c/type $c/hwtype $c/config $c/online); done
         for q in card*/*.*; do echo ${q#*/} $(cat $q/online $q/config); done
         cat /sys/bus/ap/ap_adapter_mask /sys/bus/ap/ap_usage_domain_mask /sys/bus/ap/ap_control_domain_mask",
    )?;
    let mut want = String::from("card00 CEX8A 14 1 1\ncard03 CEX8A 14 1 1\n");
    want.extend(QUEUES.map(|queue| format!("{queue} 1 1\n")));
    let zeros = |count: usize| "0".repeat(count);
    want.push_str(&format!("0x9{}\n", zeros(63)));
    want.push_str(&format!("0x02{}01{}\n", zeros(14), zeros(46)));
    want.push_str(&format!("0x02{}8{}\n", zeros(48), zeros(13)));
    ensure!(out == want, "the guest sees\n{out}instead of\n{want}");
    Ok(())
}

/// The driver's word for each queue, once it is the one that is expected.
fn interrupts(guest: &Guest, word: &str) -> Result<()> {
    let out = guest.run(&format!(
        "cd /sys/devices/ap; for try in $(seq 100); do
             [ $(cat card*/*/interrupt | grep -c '^{word}') = {} ] && break; sleep 0.1
         done; cat card*/*/interrupt",
        QUEUES.len()
    ))?;
    ensure!(out.lines().count() == QUEUES.len(), "{out}");
    ensure!(out.lines().all(|line| line.starts_with(word)), "{out}");
    Ok(())
}

/// Adapter interruptions of the AP bus so far, on all processors.
fn count(guest: &Guest) -> Result<u64> {
    let out = guest.run("grep APB: /proc/interrupts")?;
    Ok(out
        .split_whitespace()
        .filter_map(|word| word.parse::<u64>().ok())
        .sum())
}

/// Several programs at once; every queue gets some of it. Beside them one that looks at the
/// facility list all the time, which the plugin watches too.
fn crowd(guest: &Guest, requests: &[Request]) -> Result<()> {
    const PROGRAMS: usize = 8;
    // lghi %r3,32767; lghi %r0,1; stfle 0(%r15); brctg %r3,.-8
    let stfle = [
        [0xa7, 0x39, 0x7f, 0xff],
        [0xa7, 0x09, 0x00, 0x01],
        [0xb2, 0xb0, 0xf0, 0x00],
        [0xa7, 0x37, 0xff, 0xfc],
    ];
    guest.push_file("/tmp/stfle", 0o755, &program(stfle.as_flattened()))?;
    let out = guest.run(&format!(
        "while [ ! -e /tmp/over ]; do /tmp/stfle || echo stfle: $?; done & beside=$!
         for i in $(seq {PROGRAMS}); do icarsa </tmp/requests >/tmp/out.$i & wait=\"$wait $!\"; done
         wait $wait; touch /tmp/over; wait $beside; cat /tmp/out.*"
    ))?;
    let lines: Vec<&str> = out.lines().collect();
    ensure!(
        lines.len() == PROGRAMS * requests.len(),
        "{} lines",
        lines.len()
    );
    for chunk in lines.chunks(requests.len()) {
        compare(&chunk.join("\n"), requests)?;
    }
    let counts = guest.run("cat /sys/devices/ap/card*/*.*/request_count")?;
    let counts: Vec<u64> = counts
        .lines()
        .filter_map(|line| line.parse().ok())
        .collect();
    ensure!(
        counts.len() == QUEUES.len() && !counts.contains(&0),
        "requests by queue: {counts:?}"
    );
    Ok(())
}

/// Requests that the card refuses return an error, and the queue stays in use.
fn refused(guest: &Guest) -> Result<()> {
    // An even modulus, and an operand that is not below the modulus.
    let out = guest.run("printf 'me 02 03 08\\nme 09 03 07\\nme 02 03 07\\n' | icarsa")?;
    ensure!(
        out == "error Invalid argument\nerror Invalid argument\n01\n",
        "{out}"
    );
    let online = guest.run("cat /sys/devices/ap/card*/*.*/online | sort -u")?;
    ensure!(online == "1\n", "{online}");
    Ok(())
}

/// A reset by the driver: interrupts go, and come again by a second AQIC.
fn reset(guest: &Guest, requests: &[Request]) -> Result<()> {
    guest.run("for q in /sys/devices/ap/card*/*.*; do echo 1 >$q/reset; done")?;
    interrupts(guest, "Interrupts enabled")?;
    work(guest, requests)
}

/// A program that executes PQAP gets the exception of the problem state, not "no such instruction".
fn problem_state(guest: &Guest) -> Result<()> {
    guest.push_file("/tmp/pqap", 0o755, &program(&[0xb2, 0xaf, 0, 0]))?;
    guest.push_file("/tmp/none", 0o755, &program(&[0xb2, 0xac, 0, 0]))?;
    let out = guest.run(
        "echo 1 >/proc/sys/kernel/userprocess_debug; dmesg -c >/dev/null
         for p in pqap none; do /tmp/$p 2>/dev/null; echo status $?; dmesg -c | grep -o 'interruption code [0-9a-f]*'; done",
    )?;
    let want = "status 132\ninterruption code 0002\nstatus 132\ninterruption code 0001\n";
    ensure!(out == want, "{out}");
    Ok(())
}

/// A static program of these instructions and exit(0).
fn program(code: &[u8]) -> Vec<u8> {
    const BASE: u64 = 0x1_0000;
    const HEADERS: u64 = 64 + 56;
    let exit = [0xa7, 0x29, 0, 0, 0x0a, 1]; // lghi %r2,0; svc 1
    let size = HEADERS + (code.len() + exit.len()) as u64;
    let mut elf = b"\x7fELF\x02\x02\x01\0\0\0\0\0\0\0\0\0".to_vec();
    // ET_EXEC, EM_S390, version, entry, program headers, no sections, flags, sizes.
    elf.extend([0, 2, 0, 22, 0, 0, 0, 1]);
    elf.extend([BASE + HEADERS, 64, 0].map(u64::to_be_bytes).concat());
    elf.extend([0, 0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0]);
    // PT_LOAD, read and execute: offset, addresses, sizes, alignment.
    elf.extend([0, 0, 0, 1, 0, 0, 0, 5]);
    elf.extend(
        [0, BASE, BASE, size, size, 0x1000]
            .map(u64::to_be_bytes)
            .concat(),
    );
    elf.extend(code);
    elf.extend(exit);
    elf
}

/// What the plugin says when QEMU ends.
fn end(guest: Guest) -> Result<String> {
    let log = guest.log().to_path_buf();
    guest.poweroff()?;
    let text = std::fs::read_to_string(&log)?;
    let end = text.lines().find(|line| line.starts_with("ap: end:"));
    Ok(end
        .with_context(|| format!("the plugin did not end well:\n{text}"))?
        .to_string())
}

#[test]
fn linux_guest_uses_cards_with_interrupts() -> Result<()> {
    let cache = Cache::open()?;
    let Some(mainframe) = mainframe("ap::linux_guest_uses_cards_with_interrupts", &cache) else {
        return Ok(());
    };
    let plugin = plugin()?;
    let dir = tempfile::tempdir()?;
    let mut all = Vec::new();
    for bits in [1024, 2048, 4096] {
        all.extend(requests(&mainframe, bits, dir.path())?);
    }
    let options = Options {
        name: "ap",
        plugin: &plugin,
        arguments: ARGUMENTS,
        cpus: 2,
    };
    let guest = mainframe.boot(&cache, options)?;
    let mut checks = Checks::new("ap");
    checks.check("facilities", || facilities(&guest, &["12", "15", "65"]));
    checks.check("cards and queues", || seen(&guest));
    checks.check("interrupts", || interrupts(&guest, "Interrupts enabled"));
    checks.check("RSA as OpenSSL", || {
        let before = count(&guest)?;
        work(&guest, &all)?;
        let interruptions = count(&guest)? - before;
        ensure!(
            interruptions >= 1,
            "no adapter interruption for {} requests",
            all.len()
        );
        Ok(())
    });
    checks.check("a crowd", || crowd(&guest, &all));
    checks.check("refused", || refused(&guest));
    checks.check("reset", || reset(&guest, &all));
    checks.check("problem state", || problem_state(&guest));
    checks.check("reboot", || {
        guest.reboot()?;
        interrupts(&guest, "Interrupts enabled")?;
        work(&guest, &all)
    });
    let end = end(guest)?;
    checks.check("nothing held", || {
        ensure!(end.ends_with("pins=0 subclasses=0 detached=true"), "{end}");
        ensure!(end.contains(" interruptions="), "{end}");
        Ok(())
    });
    checks.finish();
    Ok(())
}

#[test]
fn linux_guest_uses_cards_without_interrupts() -> Result<()> {
    let cache = Cache::open()?;
    let Some(mainframe) = mainframe("ap::linux_guest_uses_cards_without_interrupts", &cache) else {
        return Ok(());
    };
    let plugin = plugin()?;
    let dir = tempfile::tempdir()?;
    let requests = requests(&mainframe, 2048, dir.path())?;
    let options = Options {
        name: "ap-polled",
        plugin: &plugin,
        arguments: &format!("{ARGUMENTS},interruption=off"),
        cpus: 1,
    };
    let guest = mainframe.boot(&cache, options)?;
    let mut checks = Checks::new("ap polled");
    checks.check("facilities", || facilities(&guest, &["12", "15"]));
    checks.check("cards and queues", || seen(&guest));
    checks.check("interrupts", || interrupts(&guest, "Interrupts disabled"));
    checks.check("RSA as OpenSSL", || work(&guest, &requests));
    checks.check("no interruption", || {
        ensure!(count(&guest)? == 0, "adapter interruptions without AQIC");
        Ok(())
    });
    let end = end(guest)?;
    checks.check("nothing held", || {
        ensure!(end.ends_with("pins=0 subclasses=0 detached=true"), "{end}");
        ensure!(
            !end.contains(" aqic=") && !end.contains(" interruptions="),
            "{end}"
        );
        Ok(())
    });
    checks.finish();
    Ok(())
}
