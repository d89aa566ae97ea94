//! A worker that is killed at every step of a run of a pipeline's own command. The ends are as without the crash.

use mergeberg::worker::step::Step;

use crate::crashes::Ends;
use crate::support::child::SHORT_LEASE;
use crate::support::pipeline::{Pipeline, content};

#[tokio::test(flavor = "multi_thread")]
async fn a_run_survives_a_crash_at_each_of_its_steps() {
    for step in Step::EXTERNAL {
        let pipeline = Pipeline::with(
            |house, asked, _| {
                Box::pin(async move {
                    house.finish_21(asked.branch()).await;
                    content()
                })
            },
            Some(SHORT_LEASE),
            "",
        )
        .await;
        let house = &pipeline.house;
        let request = house.enqueue_outdated("transform/a").await;
        let before = house.chain_length().await;
        assert!(house.drain_in_child(Some(step.name())), "killed at {}", step.name());
        assert!(!house.drain_in_child(None));
        let ends = Ends {
            states: vec![(request, "landed")],
            keys: vec![1, 2, 3, 8],
            refs: vec!["main", "transform/a"],
            published: 1,
        };
        house.assert_ends(&ends, before, step.name()).await;
        assert_eq!(house.done("main").await, [3, 8], "killed at {}", step.name());
        // What the dead worker began is not believed, unless its end was written down.
        let outcomes = house.outcomes(request).await;
        let expected: &[&str] = match step {
            Step::ExternalRecorded | Step::ExternalSwept => &["done"],
            _ => &["lost", "done"],
        };
        assert_eq!(outcomes, expected, "killed at {}", step.name());
    }
}

/// The orphaned command goes on, and writes when its branch is gone or given up.
#[tokio::test(flavor = "multi_thread")]
async fn an_orphaned_run_harms_nobody() {
    let pipeline = Pipeline::with(
        |house, asked, times| {
            Box::pin(async move {
                if times == 1 {
                    // Its worker is killed when it answers; it writes on the way out.
                    house.finish_21(asked.branch()).await;
                    return content();
                }
                let first = asked.branch().replace("-2", "-1");
                if house.head(&first).await.is_none() {
                    // What PyIceberg does with a branch that is not there: it makes it.
                    house
                        .writer
                        .create_branch(
                            &house.table,
                            &mergeberg_kernel::ids::RefName::new(&first),
                            asked.base(),
                        )
                        .await
                        .unwrap();
                }
                house.put_on_21(&first, &[]).await;
                house.finish_21(asked.branch()).await;
                content()
            })
        },
        Some(SHORT_LEASE),
        "",
    )
    .await;
    let house = &pipeline.house;
    let request = house.enqueue_outdated("transform/a").await;
    assert!(house.drain_in_child(Some(Step::ExternalEnded.name())));
    assert!(!house.drain_in_child(None));
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.done("main").await, [3, 8]);
    assert_eq!(house.refs().await, ["main", "transform/a"]);
    house.assert_sound().await;
}
