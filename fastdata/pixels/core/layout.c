/* records.h as text, from which Python makes its own records, and the sizes of the structs, with which it checks them.
 *
 * The preprocessor turns each entry into a string, and the compiler joins these. So Python reads exactly the records that this
 * library was compiled with. */
#include "core.h"

#define TEXT(...) #__VA_ARGS__
#define EXPANDED(...) TEXT(__VA_ARGS__)

EXPORT const char *fastdata_layout(void) {
    return "STEP||" EXPANDED(STEP_FIELDS) "\n"
           "OP||" EXPANDED(OP_FIELDS) "\n"
           "REFUSAL||" EXPANDED(REFUSAL_FIELDS) "\n"
#define ENUM(...) "ENUM||" #__VA_ARGS__ "\n"
#define RECORD(Name, ...) "RECORD|" #Name "|" #__VA_ARGS__ "\n"
#define STEP(CODE, name, ...) "STEP|" #name "|" #__VA_ARGS__ "\n"
#define CHILD(CODE, name, ...) "STEP|" #name "|" #__VA_ARGS__ "\n"
#define OP(CODE, name, ...) "OP|" #name "|" #__VA_ARGS__ "\n"
#define REFUSAL(CODE, name, ...) "REFUSAL|" #name "|" #__VA_ARGS__ "\n"
#define FUNCTION(result, name, ...) "FUNCTION|" #result " " #name "|" #__VA_ARGS__ "\n"
#include "records.h"
        ;
}

/* Sizes of Step, Op and Refusal, then of each RECORD in the order of records.h. */
EXPORT const int64_t *fastdata_sizes(void) {
    static const int64_t sizes[] = {
        sizeof(Step), sizeof(Op), sizeof(Refusal),
#define RECORD(Name, ...) sizeof(Name),
#include "records.h"
    };
    return sizes;
}
