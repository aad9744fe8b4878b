//! Generator of docs/conformance.md from the test plan and the table of cases.

use crate::case::{Case, Need};
use crate::cases::CASES;
use crate::plan::{self, GROUPS};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Entries of the plan that have cases, in order.
type Covered = BTreeMap<Key, Vec<&'static Case>>;

/// Sort key of an entry, which sorts "1.10-b" after "1.9-a": test, then the number or letter.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key(u32, u32, u32, &'static str);

impl Key {
    fn of(id: &'static str) -> Self {
        let (test, case) = id.split_once('-').unwrap_or((id, ""));
        let (group, test) = test.split_once('.').unwrap_or((test, "0"));
        // Tests without a number come last in their group, letters behind numbers.
        let test = test.parse().ok().filter(|test| *test != 0).unwrap_or(1000);
        let number = if case.is_empty() {
            0
        } else {
            case.parse().unwrap_or(1000)
        };
        Key(group.parse().unwrap_or(0), test, number, id)
    }
}

fn cases() -> impl Iterator<Item = &'static Case> {
    CASES.iter().copied().flatten()
}

fn covered() -> Covered {
    let mut covered = Covered::new();
    for case in cases() {
        for id in case.plan {
            covered.entry(Key::of(id)).or_default().push(case);
        }
    }
    covered
}

fn need(need: Need) -> &'static str {
    match need {
        Need::Always => "always",
        Need::If(capability) => capability,
    }
}

fn row(text: &mut String, columns: &[&str]) {
    let _ = writeln!(text, "| {} |", columns.join(" | "));
}

fn case_row(text: &mut String, id: &str, case: &Case) {
    let name = format!("`{}`", case.name);
    row(
        text,
        &[id, case.title, need(case.need), &name, case.section],
    );
}

/// Returns the text of docs/conformance.md.
pub fn text() -> String {
    let covered = covered();
    let mut text = String::from(HEAD);
    let all = cases().count();
    let ours = cases().filter(|case| case.plan.is_empty()).count();
    let left_out: Vec<_> = GROUPS.iter().flat_map(|group| group.left_out).collect();
    let mandatory = |of: &[&Case]| of.iter().any(|case| case.need == Need::Always);
    let must = covered.values().filter(|cases| mandatory(cases)).count();
    let lettered = |id: &str| id.ends_with(|c: char| c.is_ascii_lowercase());
    let numbered = covered.keys().filter(|key| !lettered(key.3)).count();
    let cannot = left_out.iter().filter(|e| e.need == Need::Always).count();
    let _ = writeln!(
        text,
        "There are {all} cases. {} entries have cases, {numbered} of them by the plan's own \
         number; {} have\nnone. Of the entries required of every controller, {must} have cases and \
         {cannot} have none. {ours} cases\nare our own beyond the plan.\n",
        covered.len(),
        left_out.len(),
    );
    for group in GROUPS {
        let _ = writeln!(text, "## Group {}\n", group.title);
        row(
            &mut text,
            &["plan", "requirement", "condition", "case", "standard"],
        );
        row(&mut text, &["---"; 5]);
        let number = group.title.split(' ').next().unwrap_or_default();
        for (key, cases) in &covered {
            if plan::group_of(key.3) == number {
                for case in cases {
                    case_row(&mut text, key.3, case);
                }
            }
        }
        if !group.left_out.is_empty() {
            let _ = writeln!(text, "\nWithout a case:\n");
            row(&mut text, &["plan", "requirement", "condition", "reason"]);
            row(&mut text, &["---"; 4]);
            for entry in group.left_out {
                row(
                    &mut text,
                    &[entry.id, entry.title, need(entry.need), entry.reason],
                );
            }
        }
        text.push('\n');
    }
    text += "## Beyond the plan\n\n";
    row(
        &mut text,
        &["", "requirement", "condition", "case", "standard"],
    );
    row(&mut text, &["---"; 5]);
    for case in cases().filter(|case| case.plan.is_empty()) {
        case_row(&mut text, "", case);
    }
    text
}

const HEAD: &str = "\
# Conformance

<!-- This page is made by `make docs` from the table of cases in testing/conformance. -->

This page compares the conformance cases of this project with the public test plan for NVMe (the UNH-IOL NVMe
conformance test suite): the cases for each requirement on a PCIe controller, or the reason why there is none. Every name
in the column *case* is a function that runs: a test fails when this page differs from the table of cases.

```
make conformance                                    # against vnvme, in under a minute
cargo run -p conformance -- --socket PATH           # against any controller on a vfio-user socket
cargo run -p conformance -- --socket PATH --second PATH2    # with a second one of its subsystem
cargo run -p conformance -- --list                  # the cases; --filter TEXT chooses some
```

The cases overwrite the namespaces, and need a controller without another client. Each case passes, fails (with the
expected and the actual result), or is not applicable (with the missing capability); the exit code is 1 if a case has
failed. `make conformance` runs them against a separate disk, and against two disks of one subsystem.

Numbers are those of the plan's editions for NVMe 1.3 (v9, 2018; groups 6 and 10) and for the NVM command set 1.1 (v24,
2025; the others), as far as public copies have them: `1.3-4` is case 4 of test 1.3, `4.12` a whole test. A letter
replaces the number of a case if it is unknown, or shared by several cases. Titles are our own. *Condition* is the
capability that a controller must have for the requirement; sections are those of NVMe Base 2.1, NVM Command Set 1.1,
Zoned Namespace Command Set 1.1 (ZNS) and NVMe over PCIe Transport 1.1.

";

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    #[test]
    fn conformance_document_matches_table() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/conformance.md");
        let made = text();
        if std::env::var_os("VNVME_WRITE_DOCS").is_some() {
            std::fs::write(&path, made).unwrap();
            return;
        }
        let found = std::fs::read_to_string(&path).unwrap();
        assert!(found == made, "docs/conformance.md: run `make docs`");
    }

    #[test]
    fn case_names_are_unique_and_belong_to_groups() {
        let names: BTreeSet<&str> = cases().map(|case| case.name).collect();
        assert_eq!(names.len(), cases().count());
        let groups: Vec<&str> = GROUPS
            .iter()
            .map(|group| group.title.split(' ').next().unwrap())
            .collect();
        for id in cases().flat_map(|case| case.plan) {
            assert!(groups.contains(&plan::group_of(id)), "{id}");
        }
    }

    #[test]
    fn matrix_entry_has_cases_or_reason() {
        let covered = covered();
        let mut seen = BTreeSet::new();
        for entry in GROUPS.iter().flat_map(|group| group.left_out) {
            assert!(!covered.contains_key(&Key::of(entry.id)), "{}", entry.id);
            assert!(seen.insert(entry.id), "{} twice", entry.id);
            assert!(!entry.reason.is_empty());
        }
    }

    #[test]
    fn test_keys_sort_by_number() {
        let order = ["1.2-1", "1.2-a", "1.9-a", "1.10-a", "1-a", "2.1-a", "10-a"];
        assert!(order.map(Key::of).is_sorted());
    }
}
